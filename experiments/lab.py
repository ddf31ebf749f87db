"""A model, its drafter and its acceptance rule, loaded and ready to decode: what a run and the Python API work with."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..attention.layout import Layout
from ..attention.paged import PagedCache
from ..decoding import loop, reference
from ..decoding.acceptance import Acceptance
from ..decoding.draft import Drafter, DrafterSettings, ReadsFiles, Remembers, Resources
from ..decoding.events import Generation
from ..decoding.model.decoder import Decoder
from ..decoding.model.load import load_decoder
from ..decoding.model.source import ModelSpec, Source, open_source
from ..decoding.model.storage import file_digest
from ..decoding.request import Request, request
from ..drafting.none import Nothing
from ..errors import UserError
from ..kernels.dispatch import Kernels
from .composition import draft_models
from .config import PageSettings
from .format import size as size_of
from .hardware import available_memory

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Lab:
    """Everything that decodes. `notes`: what the drafter warns of before it runs; `pages`: of the target's cache."""

    source: Source
    target: Decoder
    drafter: Drafter[Any]
    acceptance: Acceptance
    notes: tuple[str, ...] = ()
    pages: PageSettings = field(default_factory=PageSettings)
    pools: dict[str, PagedCache] = field(default_factory=dict)  # what each side shares, and with itself alone

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.source.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.source.eos_ids

    @property
    def context(self) -> int:
        return self.target.config.max_positions

    def request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop: Sequence[str] = (),
        documents: Sequence[Sequence[int]] = (),
        sample: int = 0,
    ) -> Request:
        return request(
            prompt,
            law=self.acceptance.law(),
            max_new_tokens=max_new_tokens,
            vocab=self.target.config.vocab,
            context=self.context,
            eos_ids=self.eos_ids,
            stop=stop,
            documents=documents,
            tokenizer=self.tokenizer,
            sample=sample,
            device=self.target.device,
        )

    def strategy(self, requests: Sequence[Request], seed: int = 0, **options: Any) -> Iterator[list[Generation]]:
        """The configured drafter and rule through the loop."""
        pages = self._pages("strategy")
        return loop.decode(self.target, requests, self.drafter, self.acceptance, seed=seed, pages=pages, **options)

    def plain(
        self, requests: Sequence[Request], seed: int = 0, *, paged: bool = False, **options: Any
    ) -> Iterator[list[Generation]]:
        """The plain decoder. Unless it is to be `paged` as the others are, as the baseline is, its cache is contiguous
        and finds nothing that another prompt has left: that is the oracle."""
        pages = self._pages("plain decoder") if paged else None
        return reference.decode(self.target, requests, self.acceptance.law(), seed=seed, pages=pages, **options)

    def undrafted(self, requests: Sequence[Request], seed: int = 0, **options: Any) -> Iterator[list[Generation]]:
        """Plain decoding through the loop."""
        pages = self._pages("drafting=none")
        return loop.decode(self.target, requests, Nothing(), self.acceptance, seed=seed, pages=pages, **options)

    @property
    def shares(self) -> bool:
        """Whether prompts share pages. None do where the drafter reads hidden states of the whole prompt: what is
        found is not computed, and both sides are to be treated alike."""
        return self.pages.share and not self.drafter.needs.prefill_hidden

    def _pages(self, side: str) -> PagedCache | None:
        if self.pages.size is None:
            return None
        if side in self.pools:
            return self.pools[side]
        self._check_pool()
        cache = self._paged(self.pages.size, self.pages.blocks, self.shares)
        if self.shares:
            self.pools[side] = cache
        return cache

    def pages_apart(self) -> PagedCache | None:
        """For what is measured beside a run: as many pages of its size as that needs, which share nothing."""
        return None if self.pages.size is None else self._paged(self.pages.size, None, False)

    def _paged(self, size: int, blocks: int | None, share: bool) -> PagedCache:
        of, layout = self.target, self.target.config.layout
        return PagedCache(
            layout, size=size, blocks=blocks, share=share, dtype=of.dtype, device=of.device, kernels=of.kernels
        )

    def _check_pool(self) -> None:
        """That a pool of given size fits: it is allocated at once."""
        blocks, width = self.pages.blocks or 1, self.pages.size or 0
        needed = blocks * width * self.target.config.layout.bytes_per_token(self.target.dtype.itemsize)
        free = available_memory(self.target.device)
        if free is not None and needed > free:
            raise UserError(
                f"pages.blocks={blocks} of pages.size={width} tokens take {size_of(needed)}, and "
                f"{size_of(free)} of memory are free: give fewer, or smaller ones"
            )

    def forget(self) -> None:
        """What the drafter has learnt from earlier requests, and what they have left in pages."""
        if isinstance(self.drafter, Remembers):
            self.drafter.forget()
        for pool in self.pools.values():
            pool.pages.forget()

    def text(self, tokens: Sequence[int]) -> str:
        return text_of(self.tokenizer, tokens)


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass(frozen=True, slots=True)
class Baseline:
    """Plain decoding of a whole task, timed. `units`: what each batch of prompts came to, in order."""

    kind: str
    units: tuple[list[Generation], ...]


@dataclass(slots=True)
class Warm:
    """What a worker keeps from cell to cell: the target loaded last, so that the next cell over the same model, with
    the same dtype, device, layout and kernels, loads nothing, and the baselines that it timed, each by a digest of all
    that it depends on."""

    loaded: tuple[tuple[str, torch.dtype, torch.device, Layout | None, Kernels], Decoder] | None = None
    baselines: dict[str, Baseline] = field(default_factory=dict)

    def target(
        self,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        layout: Layout | None = None,
        kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    ) -> Decoder:
        if self.loaded is None or not self.holds(source, dtype, device, layout, kernels):
            self.loaded = None  # before the next one is there
            decoder = load_decoder(
                source, dtype=dtype, device=device, layout=layout, kernels=kernels, progress=progress
            )
            self.loaded = (source.identity, dtype, device, layout, kernels), decoder
        return self.loaded[1]

    def forget(self) -> None:
        """The target goes, as soon as nobody else has it."""
        self.loaded = None

    def holds(
        self,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout | None = None,
        kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    ) -> bool:
        """Whether this target is in memory."""
        return self.loaded is not None and self.loaded[0] == (source.identity, dtype, device, layout, kernels)


def build_lab(
    source: Source,
    target: Decoder,
    drafting: DrafterSettings,
    acceptance: Acceptance,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
    pages: PageSettings | None = None,
) -> Lab:
    """Around a target that is loaded; what the drafter needs is loaded here."""
    drafter = drafting.build(Resources(target, source.tokenizer, acceptance.law(), progress))
    return Lab(source, target, drafter, acceptance, tuple(notes), pages or PageSettings())


def draft_digest(drafting: DrafterSettings, opened: Callable[[ModelSpec], Source] = open_source) -> str | None:
    """Of the models that draft, and of the files that its settings name; None without either."""
    models = [opened(spec).identity for spec in draft_models(drafting)]
    return ",".join([*models, *(_content(file) for file in files_of(drafting))]) or None


def _content(file: Path) -> str:
    try:
        return file_digest(file.expanduser())
    except OSError as error:
        raise UserError(f"{file}, which the drafter names, cannot be read ({error.strerror}): name another") from None


def files_of(settings: Any) -> list[Path]:
    """The files that a drafter's settings name, at any depth."""
    found = list(settings.files) if isinstance(settings, ReadsFiles) else []
    parts = settings if isinstance(settings, tuple | list) else ()
    if is_dataclass(settings):
        parts = [getattr(settings, f.name) for f in fields(settings)]
    return found + [file for part in parts for file in files_of(part)]


class Heard:
    """Collects what the parts warn of while they run (a draft's context is full), each text once."""

    def __enter__(self) -> "Heard":
        self._catch = warnings.catch_warnings(record=True)
        caught = self._catch.__enter__()
        assert caught is not None  # record=True
        self._caught = caught
        warnings.simplefilter("always", RuntimeWarning)
        return self

    def __exit__(self, *error: object) -> None:
        self._catch.__exit__(*error)  # type: ignore[arg-type]
        for w in self._caught:
            if not issubclass(w.category, RuntimeWarning):  # not ours to keep
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)

    @property
    def texts(self) -> list[str]:
        """So far."""
        return list(dict.fromkeys(str(w.message) for w in self._caught if issubclass(w.category, RuntimeWarning)))
