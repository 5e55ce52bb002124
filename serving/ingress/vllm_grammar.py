"""Whether a grammar lets anything be said at all. Knows xgrammar, which vLLM uses for most of them."""

import re
import threading
from typing import Any

import xgrammar
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import grammar_is_likely_lark

_BYTES = [bytes([byte]) for byte in range(256)]
_END = 256
_own = threading.local()
# Both take time in proportion to the text: nothing is tried twice. A literal ends with its line.
_LITERAL = re.compile(r'"(?:\\[^\n]|[^"\\\n])*+(?:"|\\?$)', re.MULTILINE)
_RULE = re.compile(r"^[^\S\n]*+([\w-]++)\s*+(?:::=|:)", re.MULTILINE)


def may_recur(text: str) -> bool:
    """Whether a schema or grammar refers to a part of itself; only such a one can have no beginning.

    What does not is not compiled here: that takes seconds for thousands of choices, and the engine does it anyway.
    """
    bare = _LITERAL.sub("", text)
    names = _RULE.findall(bare)
    return "$ref" in text or len(names) > 1 or any(bare.count(name) > 1 for name in names)


def _compiler() -> Any:
    """Of a vocabulary of single bytes: as strict as the model's own, and cheap to compile for. Each thread has one."""
    if not hasattr(_own, "compiler"):
        vocabulary = xgrammar.TokenizerInfo([*_BYTES, b""], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_END])
        _own.compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    return _own.compiler


def says_nothing(constraint: Any) -> bool:
    """Whether no first byte and no end satisfies ``constraint`` (vLLM's ``StructuredOutputsParams``, checked by vLLM).

    Such a grammar parses and compiles, but the engine fails at its first token. Raises what xgrammar raises.
    """
    if constraint._backend != "xgrammar" or constraint.all_constraints_none():
        return False  # the other back ends try a grammar when they check it
    kind, text = get_structured_output_key(constraint)
    if kind.name not in ("JSON", "GRAMMAR") or not may_recur(text):
        return False
    if kind.name == "JSON":
        grammar = xgrammar.Grammar.from_json_schema(text)
    else:
        parse = xgrammar.Grammar.from_lark if grammar_is_likely_lark(text) else xgrammar.Grammar.from_ebnf
        grammar = parse(text)
    matcher = xgrammar.GrammarMatcher(_compiler().compile_grammar(grammar))
    bits = xgrammar.allocate_token_bitmask(1, _END + 1)
    matcher.fill_next_token_bitmask(bits)
    return not bits.any()
