from profiler.cases.doubt import doubtful_cases


def row(case, tokens, time, status="ok"):
    return {"case_id": case, "op": "dense", "direction": "forward", "status": status, "time_us": time,
            "tokens": tokens, "n": 8, "k": 8}  # fmt: skip


def test_a_measured_case_is_doubtful_when_a_larger_one_was_clearly_faster():
    rows = [row("a", 1, 500.0), row("b", 2, 100.0), row("c", 3, 105.0), row("d", 9, float("nan"), "oom")]
    assert doubtful_cases(rows) == {"a"}
    assert doubtful_cases([]) == set()
