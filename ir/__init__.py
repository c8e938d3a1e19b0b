"""The intermediate representation: programs, functions, types, ops, plans and weights."""

from .errors import GraftworkError, InputError, PassError, UnsupportedError, VerifyError
from .function import NOWHERE, Function, Site, site_of, type_of
from .interpret import run
from .plan import DecodePlan
from .program import ModelInfo, PassRecord, Program, State
from .types import Dim, Sym, TensorType, make_dim
from .weights import Weight, WeightStore, derive, from_safetensors

__all__ = [
    "NOWHERE",
    "DecodePlan",
    "Dim",
    "Function",
    "GraftworkError",
    "InputError",
    "ModelInfo",
    "PassError",
    "PassRecord",
    "Program",
    "Site",
    "State",
    "Sym",
    "TensorType",
    "UnsupportedError",
    "VerifyError",
    "Weight",
    "WeightStore",
    "derive",
    "from_safetensors",
    "make_dim",
    "run",
    "site_of",
    "type_of",
]
