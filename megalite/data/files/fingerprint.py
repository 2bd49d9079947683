"""A hash of files by which a run notices other data: of all bytes, or of samples where there are many."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megalite.data.text.source_files import cannot_read

# Up to this size every byte is hashed, which takes about as long as to start a rank's threads.
_WHOLE_BYTES = 32 << 20
_SAMPLES, _SAMPLE_BYTES = 1024, 16 << 10


def content_fingerprint(paths: Sequence[Path]) -> str:
    """Return a hash of the sizes and contents of files in this order, wherever they lie and whatever they are called.

    Beyond 32 MiB in all it reads 1,024 evenly spread blocks of 16 KiB, with the first and last block of each file:
    another file is noticed, a change of a few bytes may not be. Raises DataError.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        sizes = [path.stat().st_size for path in paths]
        total = sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            digest.update(f"{size}\n".encode())
            with path.open("rb") as file:
                if total <= _WHOLE_BYTES:
                    while block := file.read(1 << 20):
                        digest.update(block)
                    continue
                samples = max(2, _SAMPLES * size // total)
                for sample in range(samples):
                    file.seek(max(0, size - _SAMPLE_BYTES) * sample // (samples - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise cannot_read(Path(error.filename or paths[0]), error) from error
    return digest.hexdigest()
