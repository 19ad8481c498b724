"""Checkpoints of other libraries: their configs, keys and numbers, against transformers itself."""

import pytest
import torch
from draws import DEVICE
from refusals import refused

from replayssm.models import HybridLM, families

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="transformers has other kernels on a GPU")
PUBLISHED = {
    name: (source, family) for family in set(families.FAMILIES.values()) for name, source in family.PUBLISHED.items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_links_of_a_published_geometry_cover_the_model_exactly(name):
    source, _ = PUBLISHED[name]
    config = families.adopt("HybridLM", source, {})
    model = HybridLM(config, device="meta", dtype=torch.bfloat16)
    links = families.links_of("HybridLM", config)
    ours = [key for link in links for key in link.ours]
    theirs = [key for link in links for key in link.theirs]
    tied = {"lm_head.weight"} if config["tie_embeddings"] else set()
    assert sorted(ours) == sorted(model.state_dict().keys() - tied)
    assert len(set(theirs)) == len(theirs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_that_is_not_understood_is_refused(name):
    source, family = PUBLISHED[name]
    with refused(ValueError, "rope_interleave_factor"):
        family.read_config({**source, "rope_interleave_factor": 2})
