"""Whether a pool of given size holds what a task asks of it, known before anything is decoded."""

from collections.abc import Sequence

from ..attention.pages import Pages
from ..errors import UserError
from .config import PageSettings
from .format import counted
from .items import Item
from .tasks import Task, TaskSettings, Tokenizer, encode

_ANSWER = "."  # in place of one that is not known yet


def check_blocks(
    pages: PageSettings, task: Task, settings: TaskSettings, batch: int, tokenizer: Tokenizer, context: int
) -> None:
    """Refuses a pool without room for the largest batch of prompts with all of their new tokens. Drafts take what is
    left; an answer of an earlier turn counts as long as it may get."""
    assert pages.size is not None, "blocks have a size"
    most = most_prompt = 0
    for at in range(0, len(task.items), batch):
        items = task.items[at : at + batch]
        for turn in range(max(item.turns for item in items)):
            prompts = [
                _prompt(item, turn, n, tokenizer, settings)[: context - 1]
                for n, item in enumerate(items)
                if turn < item.turns
            ]
            needed = _needed(prompts, pages.size, pages.share, settings.max_new_tokens, context)
            if needed > most:
                most, most_prompt = needed, max(map(len, prompts))
    if pages.blocks is not None and most > pages.blocks:
        of = "a prompt of" if batch == 1 else f"a batch of {batch} prompts of up to"
        raise UserError(
            f"out of KV blocks: {of} {counted(most_prompt, 'token')} with {settings.max_new_tokens} new "
            f"{'one' if settings.max_new_tokens == 1 else 'ones'} needs {counted(most, 'block')} of "
            f"{counted(pages.size, 'token')}, and the pool has {pages.blocks}; "
            f"give pages.blocks={most}, a smaller batch or fewer tokens"
        )


def _prompt(item: Item, turn: int, number: int, tokenizer: Tokenizer, settings: TaskSettings) -> list[int]:
    """Tokens that nobody else has stand for those of answers."""
    return encode(item, [_ANSWER] * turn, tokenizer, settings) + [-1 - number] * (turn * settings.max_new_tokens)


def _needed(prompts: Sequence[Sequence[int]], size: int, share: bool, new: int, context: int) -> int:
    """Blocks in use once every prompt is read, one after the other, and all but the last new token are kept."""
    pool = Pages(sum(-(-(len(prompt) + new) // size) + 1 for prompt in prompts), size, share=share)
    for n, prompt in enumerate(prompts):
        pool.open(n)
        found = pool.adopt(n, prompt)
        pool.stage({n: len(prompt) - found})
        pool.commit(n, prompt[found:])
    pool.stage({n: min(new, context - len(prompt)) - 1 for n, prompt in enumerate(prompts)})
    return pool.used
