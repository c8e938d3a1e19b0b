"""The intermediate representation: programs, functions, types, ops, plans and weights."""

from . import ops
from .decompositions import decompositions
from .defaults import Defaults
from .errors import (
    GraftworkError,
    GraftworkWarning,
    InputError,
    ParseError,
    PassError,
    UnsupportedError,
    VerifyError,
)
from .function import NOWHERE, Function, Role, Site, arguments, cone, site_of, type_of
from .interpret import run
from .match import Match
from .parser import parse_function, parse_program
from .plan import DecodePlan
from .printer import function_text
from .program import LOG, SOURCE, ModelInfo, PassRecord, Program, State, program_text
from .rewrite import Builder, Rewritten, Rule, apply_rules
from .types import Dim, Sym, TensorType, make_dim
from .verify import verify
from .weights import Weight, WeightStore, derivation, derive, from_safetensors

__all__ = [
    "LOG",
    "NOWHERE",
    "SOURCE",
    "Builder",
    "DecodePlan",
    "Defaults",
    "Dim",
    "Function",
    "GraftworkError",
    "GraftworkWarning",
    "InputError",
    "Match",
    "ModelInfo",
    "ParseError",
    "PassError",
    "PassRecord",
    "Program",
    "Rewritten",
    "Role",
    "Rule",
    "Site",
    "State",
    "Sym",
    "TensorType",
    "UnsupportedError",
    "VerifyError",
    "Weight",
    "WeightStore",
    "apply_rules",
    "arguments",
    "cone",
    "decompositions",
    "derivation",
    "derive",
    "from_safetensors",
    "function_text",
    "make_dim",
    "ops",
    "parse_function",
    "parse_program",
    "program_text",
    "run",
    "site_of",
    "type_of",
    "verify",
]
