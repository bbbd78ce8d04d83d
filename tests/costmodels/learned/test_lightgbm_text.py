"""LightGBM's own reader trusts every number of a text; whatever is not a tree must be refused before it sees it."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import FitParams
from costmodels.learned.lightgbm_text import END, UNUSED
from costmodels.learned.trees import grow_trees

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
SPLITS = "split_feature=0 0 0 0"


@pytest.fixture(scope="module")
def grown():
    rng = np.random.default_rng(0)
    inputs = {"tokens": rng.uniform(0, 10, 400), "heads": rng.integers(1, 5, 400).astype(float)}
    target = np.sin(inputs["tokens"]) + 0.1 * inputs["heads"]
    trees = grow_trees(inputs, tuple(inputs), target, FitParams(num_trees=3, num_leaves=5), linear=True)
    few = trees.linear_text.partition("Tree=3")[0] + END + "\n"  # as short as the other: a mutation hits anything
    return dataclasses.replace(trees, linear_text=few)


def test_what_is_kept_predicts_what_was_trained(grown):
    import lightgbm

    rng = np.random.default_rng(1)
    x = rng.uniform(0, 10, (500, 2))
    whole = lightgbm.train({"objective": "l1", "num_leaves": 7, "verbosity": -1}, lightgbm.Dataset(x, x[:, 0]), 5)
    named = {name: x[:, i] for i, name in enumerate(whole.feature_name())}
    kept = grow_trees(named, tuple(named), x[:, 0], FitParams(num_trees=5, num_leaves=7))
    assert kept.text.endswith(f"\n{END}\n")
    assert not any(line.startswith(UNUSED) for line in kept.text.splitlines())
    again = lightgbm.Booster(model_str=kept.text)
    assert kept.log_ratio(named).tobytes() == again.predict(x, num_threads=1).tobytes()
    assert grown.text.count("Tree=") == grown.linear_text.count("Tree=") == 3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (None, "", "line 1 .*: expected 'tree', got ''"),
        ("version=v4", "version=v5", "line 2 .*version=v4"),
        ("objective=regression_l1", "objective=poisson", "objective 'poisson', expected regression_l1 or huber"),
        ("max_feature_idx=1", "max_feature_idx=9999999", "max_feature_idx=1"),
        ("feature_names=tokens heads", "feature_names=heads tokens", "feature_names=tokens heads"),
        ("feature_infos=", "feature_infos=[0:1] ", "one range for each of 2 inputs"),
        ("Tree=1\n", "Tree=7\n", "expected 'Tree=1', got 'Tree=7'"),
        ("num_leaves=5", "num_leaves=2147483647", "num_leaves to be 1 numbers of 1 to 4096"),
        ("num_leaves=5", "num_leaves=4", "split_feature to be 3 numbers"),
        ("num_cat=0", "num_cat=1", "expected 'num_cat=0'"),
        (SPLITS, "split_feature=0 0 0 2", "split_feature to be 4 numbers of 0 to 1"),
        (SPLITS, "split_feature=0 0 0 -1", "split_feature to be 4 numbers"),
        (SPLITS, "split_feature=0 0 0", "split_feature to be 4 numbers"),
        ("decision_type=2 2 2 2", "decision_type=2 2 2 1", "no numeric splits"),
        ("left_child=3 -2", "left_child=3 -9", "left_child"),
        ("left_child=3 -2", "left_child=0 -2", "make no tree"),
        ("left_child=3 -2", "left_child=2 -2", "make no tree"),
        ("right_child=1 2", "right_child=2 1", "make no tree"),
        ("leaf_value=", "leaf_value=nan ", "leaf_value to be 5 numbers"),
        ("leaf_value=0", "leaf_value=1e300", "leaf_value to be 5 numbers of -100 to 100"),
        ("is_linear=0", "is_linear=1", "leaf_const="),
        ("shrinkage=1\n", "shrinkage=1\nshrinkage=1\n", "expected '', got 'shrinkage=1'"),
        (f"{END}\n", "", "expected Tree=|'Tree=3'"),
        (f"{END}\n", f"{END}\nparameters:\n", "expected ''|the end"),
    ],
)
def test_what_is_no_tree_is_refused_by_its_line(grown, old, new, words):
    text = new if old is None else grown.text.replace(old, new, 1)
    assert text != grown.text
    with pytest.raises(ValueError, match=words) as caught:
        dataclasses.replace(grown, text=text)
    assert "of a LightGBM text" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_features=1 1 1 1 1", "num_features=1 1 1 1 9", "num_features"),
        ("leaf_features=0 ", "leaf_features=7 ", "leaf_features"),
        ("leaf_coeff=", "leaf_coeff=1 ", "leaf_coeff to be 0 numbers"),
        ("leaf_const=", "leaf_const=inf ", "leaf_const"),
    ],
)
def test_linear_leaves_are_checked_too(grown, old, new, words):
    text = grown.linear_text.replace(old, new, 1)
    assert text != grown.linear_text
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(grown, linear_text=text)


@pytest.mark.parametrize("limits", [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf")), (-1e9, 0.0)])
def test_limits_of_linear_leaves_are_finite_and_ascend(grown, limits):
    with pytest.raises(ValueError, match="limits"):
        dataclasses.replace(grown, limits=limits)


NUMBERS = ("0", "-1", "1", "2", "4", "-5", "-6", "5", "999999999", "1e30", "nan", "inf", "1e308", "1e-300", "", " ")


@settings(max_examples=50)
@given(data=st.data())
def test_a_mutated_text_is_refused_or_answers_finite_numbers(grown, data):
    text = data.draw(st.sampled_from([grown.text, grown.linear_text]))
    for _ in range(data.draw(st.integers(1, 3))):
        lines, place = text.splitlines(keepends=True), data.draw(st.integers(0, len(text)))
        line = text.count("\n", 0, place)
        match data.draw(st.sampled_from(["number", "number", "number", "drop", "twice", "swap", "cut", "byte"])):
            case "number" if found := NUMBER.search(text, place):
                new = data.draw(st.sampled_from(NUMBERS))
                text = text[: found.start()] + new + text[found.end() :]
            case "drop":
                text = "".join(lines[:line] + lines[line + 1 :])
            case "twice":
                text = "".join(lines[: line + 1] + lines[line:])
            case "swap":
                text = "".join(lines[line:] + lines[:line])
            case "cut":
                text = text[:place]
            case _:
                text = text[:place] + data.draw(st.characters(codec="utf-8")) + text[place + 1 :]
    try:
        mutated = dataclasses.replace(grown, text=text, linear_text="")
    except ValueError:
        return
    x = np.array([-1e15, -3.0, 0.0, 0.5, 5.0, 1e15])
    assert np.isfinite(mutated.log_ratio({"tokens": x, "heads": x[::-1]})).all()
