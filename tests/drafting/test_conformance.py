"""Every drafter of configs/drafting keeps the promises of the seam."""

import pytest

from decodelab import testing
from decodelab.drafting.draft_model import DraftModel
from decodelab.tests.drafting.builders import OPTIONS, WithTinyModel, configured


@pytest.mark.parametrize("check", testing.DRAFTER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_drafter(name, check):
    check(lambda: configured(name))


def test_a_draft_model_that_samples_from_q():
    testing.sampling_is_plain_decoding(lambda: WithTinyModel(DraftModel(proposal="sampled")))
