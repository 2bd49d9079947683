"""Load a file of pickle.dump, which torch's restricted unpickler cannot read, without running its code.

Only a listed opcode and a listed name are known; each name is a stand-in (`Foreign`) or a plain constant. The unpickler
is Python's own in Python: it reads a size before it allocates, while the one in C allocates what a file asks for.
"""

import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch

from megalite.convert.foreign.unpickle import Foreign
from megalite.errors import CheckpointError

MOST_BYTES = 1 << 30
"""A larger file is refused: it is read into memory."""
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_SET, pickle.ADDITEMS),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
)
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Full name, as pickles have it -> dtype."""


class _Forbidden(Exception):
    """A name that no stand-in has."""


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def __init__(self, content: bytes, names: Mapping[str, Any]):
        super().__init__(BytesIO(content))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in DTYPES:
            return DTYPES[full_name]
        if full_name not in self._names:
            raise _Forbidden(full_name)
        return self._names[full_name]


def stand_ins(*names: str) -> dict[str, type[Foreign]]:
    """Return a stand-in class for each full name of a class."""
    return {name: type(name.rsplit(".", 1)[1], (Foreign,), {"type_name": name}) for name in names}


def load_plain_pickle(path: Path, names: Mapping[str, type[Foreign]]) -> Any:
    """Load a file of pickle.dump, with a Foreign for each object of a class of `names`; torch's dtypes are themselves.

    Raises CheckpointError if the file cannot be read, is damaged, too large, or names anything else. No code that the
    file names is ever run.
    """
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= MOST_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if size > MOST_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes, more than {MOST_BYTES:,}; it is no metadata file")
    try:
        return _Unpickler(content, names).load()
    except _Forbidden as error:
        raise CheckpointError(
            f"{path} asks for {error}, which is not among the classes allowed in such files; no code was run"
        ) from None
    except Exception as error:  # a hostile or damaged file can make the unpickler raise anything
        raise CheckpointError(
            f"{path} is not a complete pickle of the expected kind ({type(error).__name__}); fetch or write it again"
        ) from error
