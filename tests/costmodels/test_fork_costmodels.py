"""FC-41: LightGBM used in a parent, then again in forked children, must not hang."""

import multiprocessing

import numpy as np
import pytest
from patience import PATIENCE_S

from costmodels import CostModel, tables_for


def load_tables(folder, spec, topology, cap, answers):
    answers.put(int(tables_for(folder, spec, topology, cap).expert_rank_ns[-1]))


def load_and_predict(folder, spec, topology, cap, answers):
    features = {"tokens": np.arange(1.0, 2000.0), "n": np.array([512.0]), "k": np.array([512.0])}
    answers.put(float(CostModel.load(folder).predict_us("dense", "forward", features)[0].sum()))


def busy_lightgbm():
    """What a training job may have done before it forks: LightGBM with a pool of four threads."""
    import lightgbm

    inputs = np.random.default_rng(0).random((5000, 8))
    data = lightgbm.Dataset(inputs, inputs[:, 0])
    lightgbm.train({"num_threads": 4, "verbosity": -1}, data, 10).predict(inputs)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
@pytest.mark.parametrize("work", [load_tables, load_and_predict])
def test_forked_children_answer(fitted, saved, work):
    busy_lightgbm()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    arguments = (saved, fitted.spec, fitted.topology, fitted.max_tokens, answers)
    children = [context.Process(target=work, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    try:
        found = [answers.get(timeout=PATIENCE_S) for _ in children]
    finally:
        for child in children:
            child.join(1)
            child.kill()
    work(saved, fitted.spec, fitted.topology, fitted.max_tokens, answers)
    assert found == [answers.get(timeout=PATIENCE_S)] * 2
