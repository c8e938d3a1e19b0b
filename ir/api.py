"""The names of `graftwork.ir`."""

from . import ops
from .check.verify import verify
from .execution.interpret import run
from .function import NOWHERE, Function, Role, Site, arguments, cone, site_of, type_of
from .ops.decompositions import decompositions
from .plan import DecodePlan
from .plan.defaults import Defaults
from .program import LOG, SOURCE, ModelInfo, PassRecord, Program, State, program_text
from .rewrite.match import Match
from .rewrite.rules import Builder, Rewritten, Rule, apply_rules
from .support.errors import (
    GraftworkError,
    GraftworkWarning,
    InputError,
    ParseError,
    PassError,
    UnsupportedError,
    VerifyError,
)
from .text.parser import parse_function, parse_program
from .text.printer import function_text
from .types import Dim, Sym, TensorType, make_dim
from .weight_files import from_safetensors
from .weights import Weight, WeightStore, derivation, derive

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
