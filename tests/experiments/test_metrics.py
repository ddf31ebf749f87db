"""The numbers' definitions, on event logs made by hand and on those of the loop."""

import pytest

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.events import Generation, Step
from decodelab.experiments.metrics import (
    acceptance,
    by_source,
    decode_flops_per_token,
    mean,
    ratio,
    time_share,
    timing,
    tpot,
)
from decodelab.tests.rigged import PROMPTS, Rigged, ask, oracle
from decodelab.tests.tiny import tiny_decoder


def step(
    depth: int,
    accepted: int,
    emitted: int | None = None,
    *,
    drafted: int | None = None,
    sources: tuple[str, ...] = (),
    batch: int = 1,
    seconds: tuple[float, ...] = (0.0,) * 5,
) -> Step:
    """A chain of `depth` of which `accepted` were kept; `seconds`: draft, verify, accept, commit, other."""
    drafted = depth if drafted is None else drafted
    nobody = ((),) * len(sources)
    made = Step(0, 0, batch, drafted, 1 + drafted, depth, accepted, 0, sources, nobody, 0, 0, None, 0.0, *seconds)
    made.emitted = accepted + 1 if emitted is None else emitted
    return made


def generation(*delivered: tuple[float, int]) -> Generation:
    return Generation(0, 3, tokens=[7] * sum(n for _, n in delivered), delivered=list(delivered))


def test_tokens_per_step_counts_steps_without_a_draft():
    """9 tokens in 4 forwards; over the 3 that drafted, 8."""
    found = acceptance([step(0, 0), step(4, 4), step(4, 1), step(2, 0)])
    assert found["tokens_per_step"] == 9 / 4
    assert found["tokens_per_drafted_step"] == 8 / 3
    assert (found["steps"], found["steps_without_draft"]) == (4, 1)
    assert found["drafted_per_step"] == 10 / 4
    assert found["rows_verified_per_step"] == 14 / 4


def test_acceptance_is_over_steps_that_drafted():
    """5 of 10. EAGLE#132: the token behind the accepted ones is in τ, not in here."""
    found = acceptance([step(0, 0), step(4, 4), step(4, 1), step(2, 0), step(0, 0)])
    assert found["acceptance_rate"] == 5 / 10
    assert found["acceptance_by_position"] == [
        {"rate": 2 / 3, "conditional": 2 / 3, "reached": 3},
        {"rate": 1 / 3, "conditional": 1 / 2, "reached": 2},
        {"rate": 1 / 3, "conditional": 1 / 1, "reached": 1},
        {"rate": 1 / 3, "conditional": 1 / 1, "reached": 1},
    ]


def test_a_position_that_no_draft_reached_is_unknown():
    """Two drafts of 2 refused at once: the second position was judged by nobody."""
    found = acceptance([step(2, 0), step(2, 0)])
    assert found["acceptance_by_position"] == [
        {"rate": 0.0, "conditional": 0.0, "reached": 2},
        {"rate": 0.0, "conditional": None, "reached": 0},
    ]


def test_a_short_draft_does_not_count_against_the_next_position():
    """Drafts of 1 and of 3, all kept: position 2 was offered once."""
    found = acceptance([step(1, 1), step(3, 3)])
    assert [p["rate"] for p in found["acceptance_by_position"]] == [1.0, 0.5, 0.5]
    assert [p["conditional"] for p in found["acceptance_by_position"]] == [1.0, 1.0, 1.0]


def test_plain_decoding_is_one_token_a_step():
    found = acceptance([step(0, 0)] * 5)
    assert found["tokens_per_step"] == 1.0
    assert found["acceptance_rate"] is None
    assert found["tokens_per_drafted_step"] is None
    assert found["acceptance_by_position"] == []


def test_a_cut_run_counts_what_was_emitted():
    """Of a draft of 4 the second token ended the text: 2 accepted, 2 emitted, nothing behind them."""
    found = acceptance([step(4, 2, emitted=2)])
    assert found["tokens_per_step"] == 2.0
    assert found["acceptance_rate"] == 0.5


def test_a_tree_is_measured_by_its_longest_path():
    """12 nodes, 3 deep, 2 kept."""
    found = acceptance([step(3, 2, drafted=12)])
    assert found["acceptance_rate"] == 2 / 3
    assert found["drafted_per_step"] == 12
    assert found["rows_verified_per_step"] == 13


def test_accepted_tokens_by_their_source():
    found = acceptance([step(3, 2, sources=("ngram", "model")), step(2, 1, sources=("ngram",)), step(2, 0)])
    assert found["accepted_by_source"] == {"ngram": 2, "model": 1}


def test_every_source_is_told_what_it_brought():
    """Of two that offer the same token both are credited; of an earlier version's log, who drafted is not known."""
    both, none = step(3, 2, sources=("ngram", "model")), step(2, 0)
    both.also_proposed = (("model",), ())
    known = {"accepted": 1, "alone": 0}, {"accepted": 2, "alone": 1}
    unknown = {"steps": None, "drafted": None}
    assert by_source([both, none]) == {"model": known[1] | unknown, "ngram": known[0] | unknown}
    both.drafted_by, none.drafted_by = {"ngram": 1, "model": 3, "idle": 0}, {"ngram": 2, "model": 0, "idle": 0}
    assert by_source([both, none]) == {
        "ngram": known[0] | {"steps": 2, "drafted": 3},
        "model": known[1] | {"steps": 1, "drafted": 3},
        "idle": {"steps": 0, "drafted": 0, "accepted": 0, "alone": 0},
    }
    assert by_source([]) == {}


def test_nothing_is_unknown_not_zero():
    found = acceptance([])
    unknown = ("tokens_per_step", "tokens_per_drafted_step", "acceptance_rate", "drafted_per_step")
    assert [found[key] for key in unknown] == [None] * 4
    assert set(time_share([]).values()) == {None}
    assert (mean([]), ratio(0, 0), ratio(1, 4)) == (None, None, 0.25)


def test_times_of_one_prompt():
    """First token after 1 s, then 3 at 1.5 s and 1 at 2.5 s."""
    found = timing([generation((1.0, 1), (1.5, 3), (2.5, 1))])
    assert found["tokens"] == 5
    assert found["ttft_s"] == 1.0
    assert found["latency_s"] == 2.5
    assert found["tpot_s"] == 1.5 / 4
    assert found["tokens_per_second"] == 4 / 1.5
    assert found["itl_p50_s"] == pytest.approx(0.75)
    assert found["itl_p99_s"] == pytest.approx(0.995)
    assert found["burst"] == 2.0


def test_one_token_has_no_time_per_token():
    one = generation((1.0, 1))
    assert tpot(one) is None
    found = timing([one])
    assert (found["tpot_s"], found["tokens_per_second"], found["itl_p50_s"], found["burst"]) == (None,) * 4
    assert (found["tokens"], found["ttft_s"], found["latency_s"]) == (1, 1.0, 1.0)


def test_over_prompts_the_time_per_token_is_a_ratio_of_sums():
    """1 s for 1 token, 1 s for 9, and a prompt of one token that decoded nothing: 2 s for 10, not the mean of both."""
    found = timing([generation((1.0, 1), (2.0, 1)), generation((3.0, 1), (4.0, 9)), generation((2.0, 1))])
    assert found["tpot_s"] == 2 / 10
    assert found["ttft_s"] == 2.0
    assert found["tokens"] == 13


def test_an_untimed_side_has_the_same_keys():
    done = [generation((1.0, 1), (2.0, 4))]
    assert timing(done, timed=False) == dict.fromkeys(timing(done)) | {"tokens": 5}


def test_time_shared_by_a_batch_counts_once():
    """One step of two sequences, 1 s, and one of a single sequence, 3 s."""
    together = step(2, 1, batch=2, seconds=(0.5, 0.25, 0.125, 0.125, 0.0))
    alone = step(0, 0, seconds=(0.0, 3.0, 0.0, 0.0, 0.0))
    assert time_share([together, together, alone]) == {
        "draft": 0.5 / 4, "verify": 3.25 / 4, "accept": 0.125 / 4, "commit": 0.125 / 4, "other": 0.0,
    }  # fmt: skip


def test_operations_of_a_token():
    assert decode_flops_per_token(weights=10, layers=2, heads=3, head_dim=4, context=5.0) == 20 + 4 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("ends", ["length", "eos"])
def test_the_loop_s_log_adds_up(ends: str):
    """A batch of three: what steps emit, what is delivered and the tokens agree, after the cut inside an accepted run;
    each sequence has one step a forward, and the batch's seconds come to the time that passed."""
    decoder, rule = tiny_decoder(), Greedy()
    requests = [ask(p, rule, 20) for p in PROMPTS]
    plain = reference.generate(decoder, requests, rule.law())
    answers = {tuple(p): g.tokens for p, g in zip(PROMPTS, plain, strict=True)}
    if ends == "eos":
        requests = [ask(p, rule, 20, eos_ids=[plain[0].tokens[7]]) for p in PROMPTS]
    done = loop.generate(decoder, requests, Rigged(oracle(answers, (4, 0))), rule)
    assert len(done[0].tokens) == (20 if ends == "length" else 8)
    for g in done:
        assert len(g.tokens) == 1 + sum(s.emitted for s in g.steps) == sum(n for _, n in g.delivered)
        assert [n for _, n in g.delivered[1:]] == [s.emitted for s in g.steps]
        assert [at for at, _ in g.delivered[1:]] == [s.at_s for s in g.steps]
        assert acceptance(g.steps)["tokens_per_step"] == (len(g.tokens) - 1) / len(g.steps)
    steps = [s for g in done for s in g.steps]
    assert acceptance(steps)["tokens_per_step"] == sum(len(g.tokens) - 1 for g in done) / len(steps)
    assert sum(time_share(steps).values()) == pytest.approx(1)
    began = max(g.ttft_s for g in done)
    assert sum(s.total_s / s.batch for s in steps) <= max(g.latency_s for g in done) - began + 1e-3
    assert timing(done)["tokens"] == sum(len(g.tokens) for g in done)
    assert {s.batch for s in done[0].steps} <= {1, 2, 3}
    assert done[0].steps[0].batch == 3
