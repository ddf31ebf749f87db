import pytest

from decodelab.drafting.eagle_training import TrainEagle
from decodelab.drafting.medusa_training import TrainMedusa
from decodelab.errors import UserError
from decodelab.tests.taught import taught_source

WIDTHS = {TrainMedusa: 4, TrainEagle: 4}


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_vocabulary_holds_what_drafts_try_and_no_more_than_the_target_knows(kind):
    """Before an answer is asked for."""
    for size in (WIDTHS[kind], 61, None):
        assert kind(vocabulary=size).check(taught_source()) is None
    for size in (WIDTHS[kind] - 1, 62):
        line = rf"^train\.vocabulary must be from {WIDTHS[kind]}, .* to the target's 61 tokens, or null .*, got {size}$"
        with pytest.raises(UserError, match=line):
            kind(vocabulary=size).check(taught_source())
