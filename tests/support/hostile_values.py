"""Strategies for values that do not belong where they stand: of every JSON type, and of vLLM's own structures."""

from typing import Any

from hypothesis import strategies as st

INTEGERS = st.sampled_from(
    [
        *(0, 1, -1, 2, -2, 5, 20, 64, 127, 128, 129, 1000, 4095, 4096, 4097),
        *(2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 2**70, -(2**31), -(2**63), -(2**70), 10**30, 10**400),
    ]
)
FLOATS = st.sampled_from([0.5, -0.5, 1.0, 2.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), -float("inf"), -0.0])
STRINGS = st.sampled_from(
    [
        *("", "a", "\ud800", "\udfffa", "\x00", "é", "💥", "\u202e", " ", "\n"),
        *("a" * 300, "ab " * 3000, "9" * 14_000),
        *("{{ 7 * 7 }}", "{% for i in range(9**9) %}{% endfor %}", "../../etc/passwd", "__class__", "%s%n"),
        *("null", "1", "-1", "nan", "auto", "none", "required", "json_object", "<|im_end|>"),
        *("data:;base64,AAAA", "file:///etc/passwd"),
    ]
)
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, STRINGS, st.text(max_size=5))
KEYS = st.one_of(st.sampled_from(["type", "text", "json", "schema", "\ud800", "", "$ref", "function", "id"]), st.text())


def _nested(depth: int, is_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


VALUES = st.one_of(
    SCALARS,
    st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=3), max_leaves=8),
    st.builds(_nested, st.sampled_from([3, 60, 300]), st.booleans()),
    st.lists(st.sampled_from([0, 1, 5, 258, -1, 2**31, 2**70]), max_size=5),
    st.lists(STRINGS, max_size=6),
)
SCHEMAS = st.sampled_from(
    [
        *({}, True, [], "{}", "{", {"type": "nothing"}, {"enum": []}, {"enum": ["a", 1, None]}, {"anyOf": []}),
        *({"not": {}}, {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        *({"$ref": "http://x.example/schema"}, {"type": "array", "minItems": 10**6}),
        *({"type": "integer", "maximum": 2**70}, {"type": "integer", "minimum": -(2**70), "maximum": 0}),
        *({"type": "string", "pattern": pattern} for pattern in ("(a+)+$", "[", "a{1,100000}")),
        {"type": "object", "properties": {"\ud800": {"type": "string"}}},
        {"type": "object", "properties": {str(i): {"type": "string"} for i in range(200)}},
    ]
)
GRAMMARS = st.sampled_from(
    [
        *("root ::= root", 'root ::= root "a" | ""', 'root ::= "a"', "root ::=", "root ::= missing", "", "\ud800"),
        *("start: start", 'start: "a" | start "b"', 'root ::= ("a" | "b"){1,100000}', "a" * 5000),
    ]
)
REGEXES = st.sampled_from(["(a+)+$", "[", "a{1,100000}", "", "\ud800", "(?<=a)b", "\\1", "a"])
STRUCTURES = st.one_of(
    st.fixed_dictionaries({"json": SCHEMAS}),
    st.fixed_dictionaries({"grammar": GRAMMARS}),
    st.fixed_dictionaries({"regex": REGEXES}),
    st.fixed_dictionaries({"choice": st.one_of(st.lists(STRINGS, max_size=3), VALUES)}),
    st.fixed_dictionaries({"structural_tag": st.one_of(STRINGS, SCHEMAS)}),
    st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object", "whitespace_pattern"]), VALUES
    ),
)
FORMATS = st.one_of(
    st.builds(lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, SCHEMAS),
    st.sampled_from([{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "structural_tag"}]),
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["function", "", "web_search", "custom"]),
            "function": st.fixed_dictionaries({"name": STRINGS, "parameters": SCHEMAS}),
        },
        optional={"name": STRINGS, "input_schema": SCHEMAS, "strict": VALUES},
    ),
    max_size=3,
)
PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": STRINGS}),
    st.fixed_dictionaries(
        {"type": st.just("image_url"), "image_url": st.one_of(STRINGS, st.builds(dict, url=STRINGS))}
    ),
    st.fixed_dictionaries({"type": STRINGS, "input_audio": VALUES}),
    VALUES,
)
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(ROLES, VALUES)},
        optional={
            "content": st.one_of(STRINGS, st.lists(PARTS, max_size=3), VALUES),
            "tool_calls": VALUES,
            "name": VALUES,
        },
    ),
    max_size=3,
)
PROMPTS = st.one_of(
    STRINGS,
    st.lists(STRINGS, max_size=40),
    st.lists(st.integers(-1, 300), max_size=6),
    st.lists(st.lists(st.integers(0, 257), max_size=3), max_size=4),
)
TIER_NAMES = st.sampled_from(["auto", "flex", "priority", "interactive", "standard", "batch", "x", "\ud800"])
SLO_KEYS = st.sampled_from(["ttft_ms", "tpot_ms", "e2e_ms", "tier", "max_wait_ms", "program", "zzz", "\ud800", ""])
PROGRAM_KEYS = st.sampled_from(["id", "deadline_ms", "stage", "parents", "app", "\udfff"])
OBJECTIVES = st.one_of(
    VALUES,
    st.dictionaries(SLO_KEYS, st.one_of(VALUES, TIER_NAMES)),
    st.fixed_dictionaries({"program": st.dictionaries(PROGRAM_KEYS, VALUES)}),
)
NOT_JSON = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            *(b"", b"{", b"null", b"[]", b'"a"', b"1", b"NaN", b"{}{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"--x\r\n"),
            *("{}".encode("utf-16"), b"model=embedded&prompt=hi", b'{"a": 1e999}', b"1" * 5_000),
            *(b"[" * 100_000, b'{"a":' * 100_000, b"[" * 50_000 + b"]" * 50_000),
            b'{"slo":' + b"[" * 60_000 + b"]" * 60_000 + b"}",
            b'{"prompt": "' + b"a" * 200_000,
            b'{"model":"embedded","model":"x","prompt":"hi","max_tokens":' + b"9" * 5_000 + b"}",
        ]
    ),
)
HEADER_VALUES = st.one_of(
    st.sampled_from(
        [
            *(b"", b" ", b"0", b"-1", b"1", b"+5", b"500", b"1e3", b"1e400", b"nan", b"inf", b"1_000", b"0x10"),
            *(b"1,2", b"500,500", b"1;2", b"a\tb", b"{}", b"null", b"\xff\xfe", "é".encode(), "\u0665".encode()),
            *(b"interactive", b"standard", b"batch", b"flex", b"auto", b"zzz"),
            *(b"9" * 14_000, b"." * 14_000, b"1" + b"0" * 7_000 + b".", b"a" * 8_000),
            *(b"application/json; charset=utf-16", b"text/plain", b"multipart/form-data", b"*/*;q=nan"),
            *(b"Bearer \xff", b"gzip", b"identity", b"00-0-0-00", b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-01"),
        ]
    ),
    st.binary(max_size=12).map(lambda raw: bytes(each for each in raw if each >= 32 and each != 127)),
)
