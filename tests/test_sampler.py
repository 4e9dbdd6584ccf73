"""sampler.py: filters that keep what they should, and chance that is right and belongs to the request."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import logits as any_logits

from nanodecoder import Sampler
from nanodecoder.sampler import Rows, gumbel

NEG = float("-inf")


def kept(sampler: Sampler, probabilities: list[float]) -> set[int]:
    left = sampler.filter(torch.tensor([probabilities]).log())
    return set(left[0].isfinite().nonzero().flatten().tolist())


# ---- from logits to probabilities


def test_the_study_notes_softmax():
    """2, 1, 0 -> 66.5, 24.5, 9.0 %, and the same when 100 is added to all."""
    for shift in (0.0, 100.0):
        got = Sampler(temperature=1.0).probabilities(torch.tensor([[2.0, 1.0, 0.0]]) + shift)
        assert [round(p, 3) for p in got[0].tolist()] == [0.665, 0.245, 0.090]


@given(any_logits(), st.sampled_from([Sampler(), Sampler(0.7, 3), Sampler(1.3, 0, 0.8), Sampler(1.0, 0, 1.0, 0.1)]))
def test_probabilities_sum_to_one(logits, sampler):
    torch.testing.assert_close(sampler.probabilities(logits).sum(-1), torch.ones(len(logits)))


# ---- greedy


def test_greedy_takes_the_first_of_the_largest_and_draws_nothing():
    state = torch.get_rng_state()
    logits = torch.tensor([[1.0, 5.0, 5.0], [0.0, NEG, -2.0]])
    assert Sampler()(logits).tolist() == [1, 0]
    assert torch.equal(torch.get_rng_state(), state)
    assert Sampler().probabilities(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-37])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    got = Sampler(temperature).probabilities(torch.tensor([[3.0, 1e4, -1e4]]))
    assert got.tolist() == [[0, 1, 0]]


def test_rows_of_one_batch_may_have_settings_of_their_own():
    logits = torch.tensor([[1.0, 1.1, 0.9]]).expand(3000, 3)
    rows = Rows(seeds=range(3000), positions=[0] * 3000, settings=[Sampler(), Sampler(1.0), Sampler(1.0, top_k=1)] * 1000)
    ids = Sampler()(logits, rows).view(1000, 3)
    assert set(ids[:, 0].tolist()) == {1}
    assert set(ids[:, 1].tolist()) == {0, 1, 2}
    assert set(ids[:, 2].tolist()) == {1}


# ---- filters


@pytest.mark.parametrize(
    ("probabilities", "p", "wanted"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, {0, 1}),  # the one that crosses stays
        ([0.5, 0.3, 0.15, 0.05], 0.5, {0}),
        ([0.5, 0.41, 0.09], 0.9, {0, 1}),
        ([0.5, 0.41, 0.09], 1e-8, {0}),
        ([0.5, 0.41, 0.09], 0.0, {0}),
        ([0.5, 0.41, 0.09], 1.0, {0, 1, 2}),
        ([0.1, 0.2, 0.7], 0.8, {1, 2}),  # ids map back after the sort
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(probabilities, p, wanted):
    assert kept(Sampler(1.0, top_p=p), probabilities) == wanted


@given(any_logits(), st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set(logits, p):
    """What is kept reaches p, and without its least likely id it would not (up to float32's rounding)."""
    probabilities = logits.double().softmax(-1)
    kept_mask = Sampler(1.0, top_p=p).filter(logits).isfinite()
    for row, mask in zip(probabilities, kept_mask, strict=True):
        chosen = row[mask].sort().values
        assert chosen.sum() >= p - 1e-5
        assert len(chosen) == 1 or chosen[1:].sum() < p + 1e-5
        dropped = row[~mask]
        assert len(dropped) == 0 or dropped.max() <= chosen[0] + 1e-7


@pytest.mark.parametrize(("k", "wanted"), [(0, 5), (1, 1), (2, 4), (4, 4), (5, 5), (100, 5)])
def test_top_k_keeps_what_equals_the_kth(k, wanted):
    left = Sampler(1.0, top_k=k).filter(torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]]))
    assert left.isfinite().sum() == wanted


def test_min_p_is_relative_to_the_likeliest_in_any_vocabulary():
    assert kept(Sampler(1.0, min_p=0.2), [0.5, 0.11, 0.09, 0.3]) == {0, 1, 3}
    large = torch.full((1, 50_000), -20.0)
    large[0, [7, 40_000]] = torch.tensor([5.0, 4.5])
    assert Sampler(1.0, min_p=0.1).filter(large).isfinite().nonzero()[:, 1].tolist() == [7, 40_000]


def test_temperature_comes_before_truncation():
    """As in transformers. llama.cpp truncates first; at temperature 1 nobody can tell."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert Sampler(0.5, top_p=0.8).filter(logits).isfinite().tolist() == [[True, False, False]]
    assert Sampler(2.0, min_p=0.2).filter(logits).isfinite().tolist() == [[True, True, True]]


def test_a_repeated_id_is_penalized_once_and_always_downwards():
    rows = Rows(seeds=[0], positions=[3], ids=[[0, 1, 1]])
    got = Sampler(1.0, repetition_penalty=2.0).filter(torch.tensor([[3.0, -3.0, 3.0, -3.0]]), rows)
    assert got.tolist() == [[1.5, -6.0, 3.0, -3.0]]
    with pytest.raises(ValueError, match=r"needs rows\.ids"):
        Sampler(repetition_penalty=2.0)(torch.zeros(1, 4))


def test_any_function_of_logits_can_be_slipped_in():
    def ban(logits):
        return logits.index_fill(-1, torch.tensor([1]), NEG)

    assert Sampler().filter(torch.tensor([[1.0, 9.0, 2.0]]), None, ban).argmax().item() == 2


@given(any_logits(), st.sampled_from([Sampler(), Sampler(0.7, 3, 0.9, 0.05), Sampler(1.0, 0, 0.5)]))
def test_filtering_changes_no_input(logits, sampler):
    before = logits.clone()
    sampler.filter(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_dtype_are_filtered_in_float32(dtype):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().to(dtype)
    got = Sampler(1.0, top_p=0.9).probabilities(logits)
    assert got.dtype == torch.float32
    assert torch.equal(got, Sampler(1.0, top_p=0.9).probabilities(logits.float()))


# ---- chance


def test_the_study_notes_three_tokens_in_proportion():
    """0.6, 0.3, 0.1: greedy is always the first; ten thousand seeds draw in proportion."""
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log().expand(10_000, 3)
    assert set(Sampler()(logits).tolist()) == {0}
    for rows in (Rows(range(10_000), [7] * 10_000), Rows([7] * 10_000, range(10_000))):
        counts = Sampler(1.0)(logits, rows).bincount(minlength=3).double()
        expected = torch.tensor([6000.0, 3000, 1000], dtype=torch.float64)
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert chi_square < 13.8  # two degrees of freedom: exceeded once in a thousand


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_impossible_is_never_drawn(dtype):
    logits = torch.full((40, 50_000), NEG, dtype=dtype)
    possible = torch.tensor([3, 31_000, 40_000, 49_999])
    logits[:, possible] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().to(dtype)
    counts = torch.zeros(50_000, dtype=torch.int64)
    for position in range(25):
        counts += Sampler(1.0)(logits, Rows(range(40), [position] * 40)).bincount(minlength=50_000)
    assert counts.sum() == counts[possible].sum() == 1000
    assert (counts[possible].double() / 1000 - torch.tensor([0.4, 0.3, 0.2, 0.1])).abs().max() < 0.06


def test_a_token_depends_on_seed_position_and_logits_and_on_nothing_else():
    logits = torch.randn(4, 1000)
    rows = Rows([5, 6, 7, 8], [1, 2, 3, 4])
    together = Sampler(1.0)(logits, rows)
    torch.manual_seed(999)
    for order in ([3, 1, 0, 2], [2]):
        part = Rows([rows.seeds[i] for i in order], [rows.positions[i] for i in order])
        assert Sampler(1.0)(logits[order], part).tolist() == together[order].tolist()
    assert len({Sampler(1.0)(logits[:1], Rows([seed], [1])).item() for seed in range(50)}) > 30


def test_seeds_of_any_size_are_seeds():
    noise = [gumbel([seed], [0], torch.arange(8)) for seed in (0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 2)]
    assert len({tuple(row[0].tolist()) for row in noise}) == len(noise)


def test_the_noise_is_gumbel_noise_and_independent_across_seeds_positions_and_ids():
    noise = gumbel(range(300), [0] * 300, torch.arange(1000))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    uniform = torch.exp(-torch.exp(-noise.double()))
    ordered = uniform.flatten().sort().values
    steps = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert (ordered - steps).abs().max() < 1.95 / len(ordered) ** 0.5  # Kolmogorov-Smirnov at one in a thousand
    other = torch.exp(-torch.exp(-gumbel(range(300), [1] * 300, torch.arange(1000)).double()))
    for a, b in [(uniform, other), (uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])]:
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs() < 0.01


def test_the_noise_is_finite_at_both_ends_of_the_hash(monkeypatch):
    """The largest 32-bit word would make u = 1 and the noise -inf, so that an impossible id could win."""
    from nanodecoder import sampler

    monkeypatch.setattr(sampler, "_mix", lambda x: torch.full_like(x, 0xFFFF_FFFF))
    assert gumbel([0], [0], torch.arange(4)).isfinite().all()
    monkeypatch.setattr(sampler, "_mix", torch.zeros_like)
    assert gumbel([0], [0], torch.arange(4)).isfinite().all()


def test_without_rows_torchs_own_seed_decides():
    logits, sampler = torch.zeros(1, 1000), Sampler(1.0)
    torch.manual_seed(3)
    first = [sampler(logits).item() for _ in range(10)]
    torch.manual_seed(3)
    assert [sampler(logits).item() for _ in range(10)] == first
    assert len(set(first)) > 5


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or from 1e-37 to 1e37, not -0.1"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"top_k": -1}, r"top_k must be a whole number, 0 \(off\) or above, not -1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_p": 1.5}, r"top_p must be from 0 to 1 \(off\), not 1.5"),
        ({"min_p": -0.5}, r"min_p must be from 0 \(off\) to 1"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be from 1e-6 to 1e6 \(1 is off\), not 0"),
        ({"top_k": 2.0}, "top_k must be a whole number"),
        ({"temperature": 1e-50}, "temperature must be 0"),
        ({"presence_penalty": math.inf}, r"presence_penalty must be from -1e6 to 1e6 \(0 is off\), not inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be from -1e6 to 1e6"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias must be ids with numbers up to 1e6 \(-inf bans\)"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must be ids with numbers"),
        ({"banned_ids": [-1]}, r"banned_ids must be ids, not \[-1\]"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(settings, words):
    with pytest.raises(ValueError, match=words):
        Sampler(**settings)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0)])
def test_logits_that_are_no_numbers_are_refused_with_step_and_row(bad, sampler):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match=r"non-finite logits at step 4 in row 1 \(the largest is (nan|inf)\)"):
        sampler(logits, Rows([0, 0], [9, 9], steps=[4, 4]))
    with pytest.raises(ValueError, match="non-finite logits in row 0"):
        sampler(torch.full((1, 5), NEG))


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"logits must be of shape \(B, V\), not \(1, 3, 5\)"):
        Sampler().filter(torch.zeros(1, 3, 5))


# ---- bias and penalties


def test_a_bias_is_added_and_a_banned_id_is_impossible():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    sampler = Sampler(1.0, logit_bias={1: 10.0, 0: -math.inf}, banned_ids=[3])
    assert sampler.filter(logits).tolist() == [[NEG, 12.0, 3.0, NEG]]
    assert Sampler(banned_ids=[3])(logits).tolist() == [2]  # greedy too
    assert Sampler(1.0, banned_ids=(3,), logit_bias={3: 5.0}).probabilities(logits)[0, 3] == 0
    with pytest.raises(ValueError, match="the logit bias names id 4, and there are 4 ids"):
        Sampler(banned_ids=[4])(logits)
    with pytest.raises(ValueError, match="the logit bias of row 0 bans every id that was possible"):
        Sampler(banned_ids=range(4))(logits)


def test_presence_and_frequency_count_what_was_generated_and_not_the_prompt():
    """ids 0 and 0 were generated after a prompt of 0, 1, 1."""
    rows = Rows(seeds=[0], positions=[5], ids=[[0, 1, 1, 0, 0]], steps=[3])
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert Sampler(1.0, presence_penalty=0.5).filter(logits, rows).tolist() == [[2.5, 2.0, 1.0]]
    assert Sampler(1.0, frequency_penalty=0.5).filter(logits, rows).tolist() == [[2.0, 2.0, 1.0]]
    assert Sampler(1.0, presence_penalty=1.0, frequency_penalty=0.5).filter(logits, rows).tolist() == [[1.0, 2.0, 1.0]]
    assert Sampler(presence_penalty=1.5)(logits, rows).tolist() == [1]
    first = Rows(seeds=[0], positions=[3], ids=[[0, 1, 1]], steps=[1])
    assert torch.equal(Sampler(1.0, presence_penalty=9.0).filter(logits, first), logits)
    with pytest.raises(ValueError, match=r"need rows\.ids and rows\.steps"):
        Sampler(presence_penalty=1.0)(logits)


def test_every_row_may_have_settings_of_its_own():
    """One batch of five rows gives what five samplers give alone, in any order."""
    own = [
        Sampler(),
        Sampler(0.7, top_k=3),
        Sampler(1.3, top_p=0.6, min_p=0.05),
        Sampler(1.0, repetition_penalty=1.7, banned_ids=[2]),
        Sampler(1e-3, presence_penalty=2.0, logit_bias={7: 3.0}),
    ]
    logits = torch.randn(5, 40) * 3
    ids = [[row, 5, 7, 7, 9] for row in range(5)]
    rows = Rows(range(5), [5] * 5, ids, [3] * 5, own)
    together, filtered = Sampler()(logits, rows), Sampler().filter(logits, rows)
    for row in range(5):
        alone = Rows([row], [5], [ids[row]], [3])
        assert own[row](logits[row : row + 1], alone).item() == together[row].item()
        assert torch.equal(own[row].filter(logits[row : row + 1], alone)[0], filtered[row])


@settings(max_examples=60)
@given(any_logits(), st.data())
def test_the_kept_sets_are_transformers(logits, data):
    """Random logits with ties and impossible ids, random settings in transformers' order."""
    pytest.importorskip("transformers", reason="the parity extra is not installed")
    from transformers.generation import logits_process as theirs

    vocab = logits.shape[-1]
    bias = data.draw(st.dictionaries(st.integers(0, vocab - 1), st.floats(-5, 5, width=32), max_size=3))
    penalty = data.draw(st.sampled_from([1.0, 0.7, 1.3]))
    temperature = data.draw(st.sampled_from([0.5, 1.0, 1.7]))
    top_k = data.draw(st.integers(0, vocab + 3))
    top_p = data.draw(st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]))
    min_p = data.draw(st.sampled_from([0.0, 0.05, 0.3]))
    ids = data.draw(
        st.lists(st.lists(st.integers(0, vocab - 1), min_size=4, max_size=4), min_size=len(logits), max_size=len(logits))
    )
    chain = [theirs.SequenceBiasLogitsProcessor([[[index], value] for index, value in bias.items()])] if bias else []
    chain += [theirs.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    chain += [theirs.TemperatureLogitsWarper(temperature)]
    chain += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    chain += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    wanted = logits.clone()
    for process in chain:
        wanted = process(torch.tensor(ids), wanted)
    sampler = Sampler(temperature, top_k, top_p, min_p, penalty, logit_bias=bias)
    got = sampler.filter(logits, Rows([0] * len(logits), [4] * len(logits), ids))
    assert torch.equal(got.isfinite(), wanted.isfinite())
    assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-6)


# ---- many draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [50_000, 130_000])
def test_two_hundred_thousand_draws_are_in_proportion_and_none_is_impossible(vocab, dtype):
    """Over the whole vocabulary for some draws; for the rest over the four ids that a draw can reach, which is the same."""
    possible = torch.tensor([3, vocab // 2, vocab - 9_000, vocab - 1])
    logits = torch.full((1, vocab), NEG, dtype=dtype)
    logits[0, possible] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().to(dtype)
    filtered = Sampler(1.0).filter(logits)
    assert filtered.isfinite().nonzero()[:, 1].tolist() == possible.tolist()
    counts = torch.zeros(4, dtype=torch.int64)
    for position in range(0, 200_000, 2_000):
        noise = gumbel(range(2_000), [position] * 2_000, possible)
        chosen = (filtered[0, possible] + noise).argmax(-1)
        whole = Sampler(1.0)(logits.expand(2, -1), Rows(range(2), [position] * 2))
        assert whole.tolist() == possible[chosen[:2]].tolist()
        counts += chosen.bincount(minlength=4)
    expected = logits[0, possible].double().softmax(0) * counts.sum()
    assert counts.sum() == 200_000
    assert ((counts - expected) ** 2 / expected).sum().item() < 16.3  # three degrees of freedom: once in a thousand


@pytest.mark.parametrize("vocab", [50_000, 130_000])
def test_the_noise_is_uniform_and_independent_along_a_large_vocabulary_too(vocab):
    """As a chi-square of pairs: neighbouring ids, positions and seeds fall into the 10 × 10 boxes of a square evenly."""
    noise = gumbel([1, 2, 1, 2], [8, 8, 9, 9], torch.arange(vocab)).double()
    tenth = (torch.exp(-torch.exp(-noise)) * 10).long().clamp(max=9)
    pairs = [(tenth[:, :-1], tenth[:, 1:]), (tenth[0], tenth[1]), (tenth[0], tenth[2]), (tenth[0], tenth[3])]
    for a, b in pairs:
        boxes = (a * 10 + b).flatten().bincount(minlength=100).double()
        expected = boxes.sum() / 100
        assert ((boxes - expected) ** 2 / expected).sum().item() < 148.2  # 99 degrees of freedom: once in a thousand
