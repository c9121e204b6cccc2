"""The spec grammar: what is read, how faults point at their place, there and back."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core.errors import ConfigError
from moe_core.spec import Alternative, NamedBackend, Spec, parse_spec


def one(*names: NamedBackend) -> tuple[Alternative, ...]:
    return (Alternative(names),)


A, B, C = (NamedBackend(name) for name in "abc")


@pytest.mark.parametrize(
    ("text", "alternatives", "canonical"),
    [
        ("auto", one(), "auto"),
        (" a ", one(A), "a"),
        ("a + b", one(A, B), "a+b"),
        ("a,b+c , auto", (*one(A), *one(B, C), *one()), "a,b+c,auto"),
        ("a[k=v]", one(NamedBackend("a", None, {"k": "v"})), "a[k=v]"),
        (
            "a[ z=1,2 ; k=x+y:z ],b",  # separators mean nothing inside []
            (*one(NamedBackend("a", None, {"z": "1,2", "k": "x+y:z"})), *one(B)),
            "a[k=x+y:z;z=1,2],b",
        ),
        ("my-dist.x:a+b", one(NamedBackend("a", "my-dist.x"), B), "my-dist.x:a+b"),
        ("_x1+auto_", one(NamedBackend("_x1"), NamedBackend("auto_")), "_x1+auto_"),
    ],
)
def test_reads(text: str, alternatives: tuple[Alternative, ...], canonical: str):
    spec = parse_spec(text)
    assert spec.alternatives == alternatives
    assert (str(spec), spec.text) == (canonical, text)
    assert spec.is_auto == (canonical == "auto")


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("a,,b", 3, "name is missing"),
        ("a,", 3, "name is missing"),
        ("a+", 3, "name is missing"),
        ("a+b+c", 4, "at most two"),
        ("auto+a", 1, "auto takes no"),
        ("a+auto", 3, "auto takes no"),
        ("auto[k=v]", 1, "auto takes no"),
        ("d:auto", 3, "auto takes no"),
        ("auto,a", 6, "must be the last"),
        ("b,a+b, a + b", 8, "twice"),
        ("a[k=1;k=2]", 7, "'k' is given twice"),
        ("a[]", 3, "key=value"),
        ("a[k=1;]", 7, "key=value"),
        ("a[k]", 3, "'k' must look like key=value"),
        ("a[k=]", 3, "key=value"),
        ("a[k=1=2]", 3, "key=value"),
        ("a[k=1", 2, "never closed"),
        ("a]", 2, "closes nothing"),
        ("a[k=[1]]", 5, "inside"),
        ("a[k=1]x", 7, "expected"),
        ("a b", 1, "'a b' is not a backend's name"),
        ("a,1b", 3, "'1b' is not a backend's name"),
        (":a", 1, "not the name of a distribution"),
        ("-d:a", 1, "'-d' before ':'"),
    ],
)
def test_fault_points_at_its_place(text: str, place: int, says: str):
    with pytest.raises(ConfigError) as caught:
        parse_spec(text)
    (fault,) = caught.value.faults
    assert (fault.field, fault.value) == ("backend", text)
    assert fault.message.startswith(f"at character {place}: ")
    assert says in fault.message


def test_all_faults_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_spec("a b,c[k],d+e+f", field="MOE_BACKEND")
    places = [fault.message.split(":")[0] for fault in caught.value.faults]
    assert places == ["at character 1", "at character 7", "at character 13"]
    assert str(caught.value).startswith("MOE_BACKEND='a b,c[k],d+e+f': ")


@pytest.mark.parametrize("text", ["", "  ", None, 3])
def test_nothing_to_read_says_what_there_is(text: str):
    with pytest.raises(ConfigError, match=r"must be a string like 'auto', 'NAME', 'TRANSPORT"):
        parse_spec(text)


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(lambda n: n != "auto")
values = st.text(
    st.characters(exclude_characters="[];=", categories=["L", "N", "P", "S"]), min_size=1
)
backends = st.builds(
    NamedBackend,
    names,
    st.none() | st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,4}[a-z0-9])?", fullmatch=True),
    st.dictionaries(names | st.just("auto"), values, max_size=3),
)
alternatives = st.builds(Alternative, st.tuples(backends) | st.tuples(backends, backends))
specs = st.builds(
    lambda listed, last: Spec((*listed, *last), ""),
    st.lists(alternatives, min_size=1, max_size=3, unique=True),
    st.sampled_from([(), (Alternative(),)]),
)


@given(specs)
@settings(deadline=None, max_examples=100)
def test_there_and_back(spec: Spec):
    again = parse_spec(str(spec))
    assert again == spec
    assert str(again) == str(spec)
    assert pickle.loads(pickle.dumps(again)) == spec


@given(st.text("ab:+,;=[] .-") | st.text())
@settings(deadline=None, max_examples=200)
def test_any_text_is_read_or_refused(text: str):
    try:
        spec = parse_spec(text)
    except ConfigError:
        return
    assert parse_spec(str(spec)) == spec
