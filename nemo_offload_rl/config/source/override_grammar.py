"""Parses one override with Hydra's grammar; imported only if there are overrides, since that takes 0.15 s.

It does not use Hydra's `OverridesParser`, which silently keeps the last of two equal keys of a `{...}`, and offers
functions whose value differs from run to run (`shuffle`).
"""

from collections import Counter
from typing import Any

from hydra._internal.grammar import grammar_functions
from hydra._internal.grammar.functions import Functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import CommonTokenStream, InputStream, OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser


class OverrideSyntaxError(ValueError):
    """Says that a text is not a valid override; the message continues the text."""


def _functions() -> Functions:
    functions = Functions()
    for name in ("int", "float", "str", "bool"):
        functions.register(name=name, func=getattr(grammar_functions, f"cast_{name}"))
    # Sweeps are parsed so that the message can call them sweeps.
    for name in ("choice", "range", "interval", "glob"):
        functions.register(name=name, func=getattr(grammar_functions, name))
    return functions


_FUNCTIONS = _functions()


class _Visitor(HydraOverrideVisitor):
    def visitDictContainer(self, ctx: Any) -> dict[Any, Any]:
        pairs = [self.visitDictKeyValuePair(ctx.getChild(i)) for i in range(1, ctx.getChildCount() - 1, 2)]
        keys = Counter(str(key) for key, _ in pairs)
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            raise OverrideSyntaxError(f"has the key {twice[0]!r} twice; delete one")
        return dict(pairs)


def parse_override(text: str) -> Override:
    """Parse one override.

    Raises:
        OverrideSyntaxError: the text is not a valid override, or has a key twice.
    """
    listener = HydraErrorListener()
    lexer = OverrideLexer(InputStream(text))
    lexer.removeErrorListeners()
    lexer.addErrorListener(listener)
    parser = OverrideParser(CommonTokenStream(lexer))
    parser.removeErrorListeners()
    parser.addErrorListener(listener)
    try:
        override = _Visitor(_FUNCTIONS).visit(parser.override())
        assert isinstance(override, Override)
        override.input_line = text
        override.validate()
    except OverrideSyntaxError:
        raise
    except ValueError as error:
        raise OverrideSyntaxError("has an integer of more than 4,300 digits") from error
    except HydraException as error:
        advice = "write section.key=value, section.key='a=b' for a value with signs, and --config before a recipe"
        raise OverrideSyntaxError(f"cannot be read as an override; {advice}") from error
    return override
