from decimal import Decimal

import pytest

from decodelab.errors import UserError
from decodelab.experiments.items import Row
from decodelab.experiments.quality import scorers
from decodelab.experiments.quality.programs import program_of
from decodelab.experiments.quality.programs import tests_of as joined_tests
from decodelab.experiments.quality.scorers import as_number, build_scorer, last_number, scorer_text

HUMANEVAL = {
    "prompt": "import math\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    '''Of a circle.'''\n",
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(1) - math.pi) < 1e-9",
}
MBPP = {"text": "Double it.", "test_list": ["assert (double(2)) == 4", "assert double(0) == 0"], "test_setup_code": ""}


def row(**fields) -> Row:
    return Row(fields, "t.jsonl:1")


def scores(scorer, response: str, trusted: tuple[str, ...] = (), **fields) -> dict[str, float]:
    return build_scorer(scorer, trusted)(response, row(**fields))


# --- texts


@pytest.mark.parametrize(
    ("response", "exact"),
    [
        ("King Edward III", 1),
        ("  the king, Edward III.\n", 1),
        ("Edward III", 1),  # an alias
        ("King Edward III\nQuestion: who", 1),  # its first line
        ("It was King Edward III", 0),
        ("Edward II", 0),
        ("", 0),
    ],
)
def test_exact_match_is_of_the_first_line_normalised_with_any_gold(response, exact):
    found = scores("exact_match", response, answer="King Edward III", aliases=["Edward III"])
    assert found["exact_match"] == exact


def test_f1_is_of_words_as_bags_and_contains_of_words_in_a_row():
    found = scores("f1", "the cat sat on a mat", answer="A cat on the mat")
    assert found == {"f1": 6 / 7, "exact_match": 0.0, "contains": 0.0}  # cat, on, mat of 4 and 3 words
    assert scores("contains", "It is a black cat, I think", answer="Black cat")["contains"] == 1
    assert scores("contains", "concatenate", answer="cat")["contains"] == 0


def test_the_main_metric_is_the_first():
    assert build_scorer("exact_match", ()).metrics == ("exact_match", "f1", "contains")
    assert build_scorer("contains", ()).metrics == ("contains", "exact_match", "f1")


def test_a_gold_that_normalising_would_empty_still_counts():
    assert scores("exact_match", "?", answer="?")["exact_match"] == 1
    assert scores("exact_match", "!", answer="?")["exact_match"] == 0
    assert scores("exact_match", "", answer="The")["exact_match"] == 0


def test_texts_may_be_compared_as_they_are():
    strict = {"name": "exact_match", "normalise": False}
    assert scores(strict, " x = 1 \n", answer="x = 1")["exact_match"] == 1
    assert scores(strict, "X = 1", answer="x = 1")["exact_match"] == 0


def test_a_gold_of_several_lines_is_compared_with_all_of_the_answer():
    assert scores("exact_match", "a\nb\n", answer="a\nb")["exact_match"] == 1
    assert scores("exact_match", "a", answer="a\nb")["exact_match"] == 0


# --- numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", "1000"),
        ("$1000.00.", "1000.00"),
        ("so 80,000-50,000=30,000", "30000"),
        ("10-5", "5"),
        ("x = -5", "-5"),
        ("-$5 each", "-5"),
        ("- 5 apples", "5"),
        ("the answer is 7. H2O and v3", "7"),
        ("3, 4 and 5", "5"),
        ("100,2000", "2000"),
        ("1e3", "1000"),
        ("\\boxed{17}", "17"),
        (".5", "0.5"),
        ("#### 70,000\nQuestion: 3", "70000"),
        ("none", None),
    ],
)
def test_the_last_number_of_an_answer(text, value):
    assert last_number(text) == (None if value is None else Decimal(value))


def test_a_gold_is_a_number_only_if_nothing_else_stands_there():
    assert as_number(" $1,000.50 ") == Decimal("1000.5")
    assert as_number("50%") == 50
    assert as_number("5 apples") is None
    assert as_number("2024-01-01") is None


@pytest.mark.parametrize("gold", ["1000", "1,000", 1000, 1000.0, "$1000.00", "1e3"])
def test_numbers_are_compared_as_numbers(gold):
    assert scores("number", "That makes $1,000.", answer=gold) == {"exact_match": 1.0}
    assert scores("number", "That makes $1,001.", answer=gold) == {"exact_match": 0.0}
    assert scores("number", "That makes a lot.", answer=gold) == {"exact_match": 0.0}


def test_a_tolerance_is_a_difference():
    near = {"name": "number", "tolerance": 0.01}
    assert scores(near, "3.14", answer="3.15")["exact_match"] == 1
    assert scores(near, "3.14", answer="3.1501")["exact_match"] == 0


def test_a_gold_that_is_no_number_is_refused_by_line():
    with pytest.raises(UserError, match=r"t\.jsonl:1: answer='seven' is no number"):
        build_scorer("number", ()).check(row(answer="seven"))


# --- patterns


def test_a_pattern_gives_its_first_group_or_a_named_one_of_the_first_or_last_match():
    response = "Answer: B, or Answer: C"
    assert scores({"name": "regex", "pattern": r"Answer: (\w)"}, response, answer="B")["exact_match"] == 1
    last = {"name": "regex", "pattern": r"Answer: (?P<letter>\w)", "group": "letter", "which": "last"}
    assert scores(last, response, answer="C")["exact_match"] == 1
    assert scores({"name": "regex", "pattern": r"[A-C], or"}, response, answer="B, or")["exact_match"] == 1
    assert scores({"name": "regex", "pattern": "none"}, response, answer="B")["exact_match"] == 0


def test_a_pattern_without_a_gold_is_to_be_found_and_case_may_be_ignored():
    assert scores({"name": "regex", "pattern": "^yes", "ignore_case": True}, "Yes!") == {"exact_match": 1.0}
    assert scores({"name": "regex", "pattern": "^yes"}, "Yes!") == {"exact_match": 0.0}
    assert scores({"name": "regex", "pattern": r"(\w+)", "ignore_case": True}, "PARIS", answer="Paris")["exact_match"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pattern": "("}, r"scorer\.pattern='\(' is no regular expression"),
        ({"pattern": "(a)", "group": 2}, r"scorer\.group=2: the pattern has 1 groups"),
        ({"pattern": "(a)", "group": "x"}, r"scorer\.group='x' is not in scorer\.pattern"),
        ({"patern": "a"}, r"scorer\.patern is unknown: did you mean pattern\?"),
        ({}, r"scorer\.pattern is missing"),
        ({"pattern": "a", "timeout": 0}, r"scorer\.timeout=0\.0: seconds that an answer may take: more than 0"),
    ],
)
def test_a_wrong_pattern_is_one_line(keys, message):
    with pytest.raises(UserError, match=message):
        build_scorer({"name": "regex", **keys}, ())


def test_a_pattern_that_backtracks_for_ever_is_ended_and_told():
    scorer = {"name": "regex", "pattern": "(a+)+$", "timeout": 0.1}
    why = r"t\.jsonl:1: scorer\.pattern='\(a\+\)\+\$' took over 0\.1 s on an answer of 51 characters: a repeat within"
    with pytest.raises(UserError, match=why):
        scores(scorer, "a" * 50 + "b", answer="a")


# --- JSON


@pytest.mark.parametrize(
    "response",
    [
        '{"person": {"ages": [3, 42]}}',
        'Here it is:\n```json\n{"person": {"ages": [3, 42.0]}}\n```\nDone.',
        'I think {not json} {"person": {"ages": [3, "42"]}} fits',
    ],
)
def test_a_field_of_json_is_found_in_fences_and_in_text(response):
    scorer = {"name": "json_field", "field": "person.ages.1"}
    assert scores(scorer, response, answer=42) == {"exact_match": 1.0, "valid_json": 1.0}
    assert scores(scorer, response, answer=43) == {"exact_match": 0.0, "valid_json": 1.0}
    assert scores({"name": "json_field", "field": "person.names.0"}, response, answer=42)["exact_match"] == 0


def test_json_is_compared_by_value():
    assert scores("json_field", '{"b": 1.0, "a": " x "}', answer={"a": "x", "b": 1})["exact_match"] == 1
    assert scores("json_field", '{"a": "x"}', answer={"a": "x", "b": 1})["exact_match"] == 0
    assert scores({"name": "json_field", "field": "ok"}, '{"ok": true}', answer=True)["exact_match"] == 1
    assert scores({"name": "json_field", "field": "ok"}, '{"ok": 1}', answer=True)["exact_match"] == 0
    assert scores({"name": "json_field", "field": "id"}, '{"id": "007"}', answer="7")["exact_match"] == 0
    assert scores("json_field", "no json", answer="x") == {"exact_match": 0.0, "valid_json": 0.0}


# --- programs


def test_a_completion_is_cut_where_the_function_ends():
    response = "    return math.pi * r * r\n\ndef other():\n    pass\n"
    assert program_of(response, row(**HUMANEVAL)) == HUMANEVAL["prompt"] + "    return math.pi * r * r\n"


def test_of_a_chat_the_first_block_that_defines_the_function_counts_with_what_the_prompt_has_before_it():
    block = "def area(r):\n    return half(2 * math.pi * r * r)\n"
    response = f"Use:\n```\narea(2)\n```\nSo:\n```python\n{block}```\nBye.\n"
    program = program_of(response, row(**HUMANEVAL))
    assert program == f"import math\n\ndef half(x):\n    return x / 2\n\n\n{block}"
    assert scores("unit_tests", response, **HUMANEVAL) == {"pass@1": 1.0}


def test_a_block_that_is_cut_off_and_a_whole_function_without_a_fence_count_too():
    whole = "def area(r):\n    return math.pi * r ** 2"
    assert program_of(f"```python\n{whole}", row(**HUMANEVAL)).endswith(f"\n\n{whole}")
    assert program_of(whole, row(**HUMANEVAL)).endswith(f"return x / 2\n\n\n{whole}")


def test_a_program_without_an_entry_point_is_the_block_that_the_tests_use_or_all_up_to_done():
    code = "def double(x):\n    return 2 * x\n"
    assert program_of(f"{code}[DONE]\nmore", row(**MBPP)) == code
    assert program_of(f"First\n```\nx = 1\n```\n```python\n{code}```", row(**MBPP)) == code
    assert scores("unit_tests", f"{code}[DONE]\nmore", **MBPP) == {"pass@1": 1.0}
    assert scores("unit_tests", "def double(x):\n    return x\n", **MBPP) == {"pass@1": 0.0}


def test_the_setup_of_tests_may_use_the_program():
    tests = joined_tests(row(test_setup_code="tree = Node(1)", test_list=["assert tree.data == 1"]))
    assert tests == "tree = Node(1)\nassert tree.data == 1"


def test_rows_without_tests_are_refused_by_line():
    with pytest.raises(UserError, match=r"t\.jsonl:1: test or test_list is missing"):
        build_scorer("unit_tests", ()).check(row(prompt="x"))
    with pytest.raises(UserError, match=r"timeout=0\.0: more than 0"):
        build_scorer({"name": "unit_tests", "timeout": 0}, ())


# --- functions of the user's


@pytest.fixture
def lab(tmp_path, monkeypatch):
    (tmp_path / "scorelab").mkdir()
    (tmp_path / "scorelab" / "__init__.py").write_text("")
    (tmp_path / "scorelab" / "score.py").write_text(
        "from os.path import join\n"
        "def length(response, row): return len(response) / row['most']\n"
        "def right(response, row): return response == row['answer']\n"
        "def several(response, row): return {'words': len(response.split()), 'empty': not response}\n"
        "def wrong(response, row): return 'good'\n"
        "def given(response, row): return row['most']\n"
        "def parsed(response, row):\n"
        "    import json\n"
        "    return len(json.loads(response))\n"
        "def endless(response, row):\n"
        "    while True:\n"
        "        pass\n"
        "def refused(response, row): raise TimeoutError('of its own')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return ("scorelab",)


def test_a_function_gives_a_number_a_bool_or_numbers_by_name(lab):
    assert scores("scorelab.score.length", "four", lab, most=8) == {"length": 0.5}
    assert scores("scorelab.score.right", "x", lab, answer="x") == {"right": 1.0}
    scorer = {"name": "scorelab.score.several", "main": "words", "higher_is_better": False}
    assert scores(scorer, "a b", lab) == {"words": 2.0, "empty": 0.0}
    built = build_scorer(scorer, lab)
    assert (built.metrics, built.higher_is_better) == (("words",), False)


def test_what_a_function_gives_is_checked(lab):
    with pytest.raises(UserError, match=r"t\.jsonl:1: scorelab\.score\.wrong gave 'good'; a number, a bool"):
        scores("scorelab.score.wrong", "x", lab)
    with pytest.raises(UserError, match=r"scorelab\.score\.several gave words, empty; say which counts"):
        scores("scorelab.score.several", "x", lab)


@pytest.mark.parametrize("most", [float("nan"), float("inf")])
def test_what_a_function_gives_is_finite(lab, most):
    """Else the run could be compared with no other."""
    with pytest.raises(UserError, match=rf"t\.jsonl:1: scorelab\.score\.given gave {most}; given must be finite"):
        scores("scorelab.score.given", "x", lab, most=most)


def test_what_a_function_raises_is_one_line_that_says_where(lab):
    """In its own file, and not in the library that it called."""
    why = r"JSONDecodeError: Expecting value: line 1 column 1 \(char 0\) \(\S+scorelab/score\.py:9\)$"
    with pytest.raises(UserError, match=rf"t\.jsonl:1: scorelab\.score\.parsed raised {why}"):
        scores("scorelab.score.parsed", "no\njson", lab)


def test_a_function_that_loops_is_ended_and_told(lab):
    why = r"t\.jsonl:1: scorelab\.score\.endless took over 0\.1 s on an answer; mend it, or give it longer"
    with pytest.raises(UserError, match=why):
        scores({"name": "scorelab.score.endless", "timeout": 0.1}, "x", lab)
    with pytest.raises(UserError, match=r"scorelab\.score\.refused raised TimeoutError: of its own"):
        scores("scorelab.score.refused", "x", lab)


@pytest.mark.parametrize("path", ["scorelab.score.length", "os.system", "decodelab.experiments.cli.main"])
def test_nothing_untrusted_is_imported(lab, path, monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(UserError, match=rf"scorer={path} is refused: it is a function of a trusted package; trusted="):
        build_scorer(path, ())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("scorelab.score.join", r"scorelab\.score has no function join of its own"),
        ("scorelab.score.none", r"scorelab\.score has no function none of its own"),
        ("scorelab.other.f", r"there is no module scorelab\.other; install its package"),
        ("os.path.join", r"is refused: it is a function of scorelab; trusted="),
    ],
)
def test_a_path_that_leads_nowhere_is_one_line(lab, path, message):
    with pytest.raises(UserError, match=message):
        build_scorer(path, lab)


# --- names


def test_an_unknown_scorer_is_one_line():
    with pytest.raises(UserError, match=r"scorer='exact' is unknown: did you mean exact_match\?"):
        build_scorer("exact", ())
    with pytest.raises(UserError, match=r"scorer\.main is not to be given"):
        build_scorer({"name": "f1", "main": "contains"}, ())
    with pytest.raises(UserError, match=r"scorer\.tolerence is unknown: did you mean tolerance\?"):
        build_scorer({"name": "number", "tolerence": 1}, ())


def test_a_scorer_is_recorded_with_its_keys():
    assert scorer_text("number") == "number"
    assert scorer_text({"name": "regex", "pattern": "a", "group": 0}) == "regex{group: 0, pattern: 'a'}"
    assert set(scorers.SCORERS) == {"exact_match", "f1", "contains", "regex", "number", "json_field", "unit_tests"}
