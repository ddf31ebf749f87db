"""The verdict: what counts as the target's own output, and that nothing else does."""

from typing import Any, ClassVar

import pytest
import torch

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Block, Greedy, Guarantee, Sampling, Verdict
from decodelab.decoding.draft import Gives
from decodelab.drafting.draft_model import DraftModel, ModelDrafter
from decodelab.drafting.none import Nothing
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.experiments import measure
from decodelab.experiments.exactness import (
    PROVEN,
    Divergence,
    divergence,
    first_difference,
    is_near_tie,
    ulp,
    verdict,
)
from decodelab.tests.enumeration import outcomes, total_variation
from decodelab.tests.rigged import Rigged, ask, oracle
from decodelab.tests.tiny import tiny_decoder

HALVES = [torch.bfloat16, torch.float16]


def near(gap: float | None = 0.0, *, second: bool = True, top: float = 1.0) -> Divergence:
    return Divergence("a", 3, expected=1, got=2, gap=gap, second=second, top_logit=top)


@pytest.mark.parametrize(
    ("want", "got", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [], None), ([], [4], 0)],
)
def test_the_first_difference(want: list[int], got: list[int], at: int | None):
    assert first_difference(want, got) == at


def found(scores: list[float], want: int, got: int) -> Divergence:
    seen = (torch.tensor(scores), torch.tensor(scores) - 1)
    found = divergence("a", [9, want], [9, got], lambda at: seen if at == 1 else None)
    assert found is not None
    assert (found.id, found.position, found.expected, found.got) == ("a", 1, want, got)
    return found


def test_a_divergence_tells_the_gap_and_whether_the_token_was_the_second_choice():
    second = found([1.0, 3.0, 2.5], want=1, got=2)
    assert (second.gap, second.second, second.top_logit) == (0.5, True, 2.0)
    third = found([1.0, 3.0, 2.5], want=1, got=0)
    assert (third.gap, third.second) == (2.0, False)
    assert found([-9.0, 3.0, 2.5], want=1, got=2).top_logit == 2.0  # the top one, not the largest magnitude


@pytest.mark.parametrize(("want", "got"), [(0, 1), (1, 0)])
def test_of_two_tokens_that_tie_either_is_the_second_choice(want: int, got: int):
    """bf16 logits tie exactly now and then, and topk may put either first."""
    tie = found([2.0, 2.0, 1.0], want=want, got=got)
    assert (tie.gap, tie.second) == (0.0, True)
    behind = found([3.0, 2.0, 2.0], want=0, got=got + 1)
    assert (behind.gap, behind.second) == (1.0, True)


def test_a_forbidden_token_has_no_gap():
    """-inf is not a number that JSON knows, and nothing near a tie."""
    forbidden = found([1.0, -torch.inf], want=0, got=1)
    assert forbidden.gap is None
    assert not is_near_tie(forbidden, torch.bfloat16)


@pytest.mark.parametrize(("want", "got"), [([1, 2], [1]), ([1], [1, 2])])
def test_an_early_end_is_no_tie(want: list[int], got: list[int]):
    def nothing(at: int) -> None:
        raise AssertionError("there is no choice to look at")

    early = divergence("a", want, got, nothing)
    assert (early.position, early.gap, early.second) == (1, None, None)
    for dtype in (torch.float32, *HALVES):
        assert not is_near_tie(early, dtype)
    assert verdict([early], 100, PromptLookup(), Greedy(), torch.bfloat16) == "broken"


def test_without_scores_there_is_no_tie():
    assert not is_near_tie(divergence("a", [1], [2], lambda at: None), torch.bfloat16)
    assert divergence("a", [1, 2], [1, 2], lambda at: None) is None


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("x", [1.0, 1.99, 2.0, 20.0, -20.0, 0.3])
def test_a_unit_in_the_last_place(dtype: torch.dtype, x: float):
    rounded = torch.tensor(abs(x), dtype=dtype)
    above = torch.nextafter(rounded, torch.tensor(torch.inf, dtype=dtype))
    assert ulp(x, dtype) == float(above) - float(rounded)


@pytest.mark.parametrize(
    ("d", "dtype", "tie"),
    [
        (near(1e-3), torch.float32, True),
        (near(1.001e-3), torch.float32, False),
        (near(0.0, second=False), torch.float32, False),
        (near(0.25, top=20.0), torch.bfloat16, True),  # ulp of 20: 1/8
        (near(0.2501, top=20.0), torch.bfloat16, False),
        (near(0.25, top=15.9), torch.bfloat16, False),
        (near(0.25, top=20.0, second=False), torch.bfloat16, True),  # three that tie
        (near(1 / 32, top=20.0), torch.float16, True),
        (near(1 / 31, top=20.0), torch.float16, False),
        (near(0.0), torch.float64, False),
        (near(None), torch.bfloat16, False),
    ],
)
def test_near_ties_by_dtype(d: Divergence, dtype: torch.dtype, tie: bool):
    assert is_near_tie(d, dtype) == tie
    many = 10
    assert verdict([d], many, PromptLookup(), Greedy(), dtype) == ("near-tie" if tie else "broken")


@pytest.mark.parametrize(
    ("ties", "prompts", "dtype", "expected"),
    [
        (0, 10, torch.float32, "exact"),
        (0, 10, torch.float64, "exact"),
        (1, 5, torch.float32, "near-tie"),
        (1, 4, torch.float32, "broken"),
        (3, 15, torch.float32, "near-tie"),
        (4, 15, torch.float32, "broken"),
        (15, 15, torch.bfloat16, "near-tie"),
        (15, 15, torch.float16, "near-tie"),
        (1, 1000, torch.float64, "broken"),
    ],
)
def test_in_float32_one_prompt_in_five_may_tie(ties: int, prompts: int, dtype: torch.dtype, expected: str):
    assert verdict([near()] * ties, prompts, PromptLookup(), Greedy(), dtype) == expected
    assert verdict([near()] * ties, prompts, PromptLookup(), Sampling(), dtype) == expected


def test_one_that_is_no_tie_breaks_all():
    assert verdict([near(), near(5.0)], 100, PromptLookup(), Greedy(), torch.bfloat16) == "broken"


def drawing(target: Any, draft: Any, **settings: Any) -> ModelDrafter:
    return ModelDrafter(DraftModel(proposal="sampled", **settings), draft, target.config.vocab, Sampling().law())


def test_same_law_is_for_pairs_that_are_proven():
    """A drafter of a user's own may say that it samples, and draw from something else."""
    tiny = tiny_decoder()
    own = Rigged(oracle({}), gives=Gives("chain", 4, 4, "sampled"))
    assert verdict([near(9.0)], 1, drawing(tiny, tiny), Sampling(), torch.float64) == "same law"
    assert verdict([], 1, own, Sampling(), torch.float64) == "broken"
    # greedy draws nothing: tokens are compared
    assert verdict([near(9.0)], 1, own, Greedy(), torch.float32) == "broken"
    assert verdict([], 1, own, Greedy(), torch.float32) == "exact"


class Draws(Sampling):
    """A rule of a user's own that draws by q."""

    needs_q: ClassVar[bool] = True


def test_a_rule_of_a_user_s_own_that_draws_by_q_is_not_proven():
    assert verdict([near(9.0)], 1, PromptLookup(), Draws(), torch.float64) == "broken"


class Lossy(Greedy):
    guarantee: ClassVar[Guarantee] = "lossy"


def test_lossy_is_declared():
    assert verdict([], 1, PromptLookup(), Lossy(), torch.float32) == "lossy"
    assert verdict([near(9.0)], 1, PromptLookup(), Lossy(), torch.float32) == "lossy"


def test_block_draws_of_its_own_have_the_law_whatever_is_drafted():
    tiny = tiny_decoder()
    assert verdict([near(9.0)], 1, PromptLookup(), Block(), torch.float32) == "same law"
    assert verdict([near(9.0)], 1, drawing(tiny, tiny), Block(), torch.float32) == "same law"
    own = Rigged(oracle({}), gives=Gives("chain", 4, 4, "sampled"))
    assert verdict([], 1, own, Block(), torch.float32) == "broken"


@pytest.mark.parametrize("rule", [Sampling(), Block()], ids=["sampling", "block"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.7}, {"confidence": 0.5}])
def test_the_law_of_every_proven_pair(rule: Any, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    """A rule × draft_model with drawn proposals: every draw of three tokens enumerated, p ≠ q (transformers#47932,
    vllm#40149). With the pairs proven here, PROVEN may list them."""
    assert {(Sampling, ModelDrafter), (Block, ModelDrafter)} == PROVEN
    sizes = {"vocab_size": 3, "num_hidden_layers": 1, "hidden_size": 16}
    target = tiny_decoder(0, scale=6.0, **sizes)
    drafter, rule = drawing(target, tiny_decoder(1, scale=6.0, **sizes), max_draft=2, **settings), rule
    request = ask([1, 2], rule, 3)
    drafted = outcomes(monkeypatch, lambda: tuple(loop.generate(target, [request], drafter, rule)[0].tokens))
    plain = outcomes(monkeypatch, lambda: tuple(reference.generate(target, [request], rule.law())[0].tokens))
    assert len(plain) == 27
    assert sum(drafted.values()) == pytest.approx(1)
    assert total_variation(drafted, plain) < 1e-5


@pytest.mark.parametrize("kind", ["drafting=none", "plain decoder"])
def test_a_rule_that_errs_is_broken(kind: str, bench: Any, sabotage: Any, baseline: Any, capsys: Any):
    baseline(kind)
    sabotage()
    assert bench.run() == 1
    told = capsys.readouterr().out
    assert "output: broken – NOT the target's output" in told
    result = bench.result
    assert (result["status"], result["baseline"]["kind"]) == ("broken", kind)
    found = result["exactness"]
    assert found["verdict"] == "broken"
    assert found["identical"] == found["prompts"] - len(found["divergences"]) < found["prompts"]
    first = found["divergences"][0]
    assert f"{first['id']}: token {first['position']} is id {first['got']}, not id {first['expected']}" in told
    assert first["gap"] > 1e-3


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "drafting=none does not emit what the plain decoder emits"),
        (
            ["pages.size=4", "pages.share=true"],
            "drafting=none on shared pages differs from contiguous plain decoding",
        ),
    ],
)
def test_a_loop_that_errs_alike_without_drafts_is_broken(
    bench: Any, baseline: Any, monkeypatch: pytest.MonkeyPatch, more: list[str], told: str
):
    """The oracle is the plain decoder, even where drafting=none is the faster baseline and just as wrong."""
    baseline("drafting=none")
    honest = Greedy.judge

    def judge(self: Greedy, draft: Any, law: Any, noise: Any) -> Any:
        verdict = honest(self, draft, law, noise)
        return type(verdict)(verdict.path, (verdict.next + 1) % 256)

    monkeypatch.setattr(Greedy, "judge", judge)
    assert bench.run("drafting=none", *more) == 1
    result = bench.result
    assert result["exactness"]["identical"] == 0
    assert f"copy: {told}" in result["warnings"]


def test_a_rule_that_keeps_whatever_is_drafted_is_broken(bench: Any, monkeypatch: pytest.MonkeyPatch):
    """vllm-ascend#13730: its acceptance is superb."""

    def judge(self: Greedy, draft: Any, law: Any, noise: Any) -> Verdict:
        return Verdict(tuple(range(len(draft))), law.choose(len(draft), noise, len(draft)))

    monkeypatch.setattr(Greedy, "judge", judge)
    assert bench.run() == 1
    assert bench.result["strategy"]["acceptance_rate"] > 0.8
    assert bench.result["exactness"]["verdict"] == "broken"


@pytest.fixture
def baseline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chooses the baseline, which is otherwise the faster one."""

    def choose(kind: str) -> None:
        def warm_up(self: measure.Sides, *_: Any) -> None:
            self._warm, self.baseline_kind = True, kind

        monkeypatch.setattr(measure.Sides, "warm_up", warm_up)

    return choose


def test_a_user_s_drawing_drafter_is_told_why(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("decodelab.experiments.exactness.PROVEN", frozenset())
    words = ["drafting=draft_model", "drafting.proposal=sampled", f"drafting.model.path={bench.checkpoint}"]
    assert bench.run(*words, "acceptance=sampling", "timing=untimed") == 1
    assert bench.result["warnings"][-1] == (
        "no test of ours proves the law of ModelDrafter with Sampling, so its output counts as broken"
    )


def test_nothing_drafted_is_exact():
    assert verdict([], 3, Nothing(), Sampling(), torch.float32) == "exact"
