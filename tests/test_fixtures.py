"""What transformers computed on small redrawn checkpoints, kept in files: the maths is proved without it."""

from __future__ import annotations

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file

import nanodecoder as nd

FOLDERS = sorted(path.parent.name for path in FIXTURES.glob("*/expected.safetensors"))


def test_there_are_fixtures_for_every_family():
    kinds = {nd.load_model(FIXTURES / name).config.model_type for name in FOLDERS}
    assert kinds == set(nd.families.FAMILIES) - {"nanodecoder"}  # which transformers does not know


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_and_greedy_tokens(name, path):
    expected, model = load_file(FIXTURES / name / "expected.safetensors"), nd.load_model(FIXTURES / name)
    model.attention = path
    x, wanted = expected["tokens"], expected["logits"]
    with torch.no_grad():
        assert (model(x) - wanted).abs().max() <= 1e-5
        whole_only = model.must_begin_anew(9, 9, 40)
        for sizes in ([40],) if whole_only else ([5, 4, 31], [1] * 40):
            cache = nd.KVCache(model.config, 2, 40)
            got = torch.cat([model(piece, cache) for piece in x.split(sizes, dim=1)], 1)
            assert (got - wanted).abs().max() <= 1e-5
    done = nd.complete(model, None, x[:1, :7], max_new_tokens=20, ignore_eos=True)[0]
    assert done.ids == expected["greedy"][0].tolist()
