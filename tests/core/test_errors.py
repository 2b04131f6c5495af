"""Bad input: the message names the argument, the value found and what is accepted; the caret finds the token."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from lucidnn import functional as F
from lucidnn.core import registry, settings
from lucidnn.core.errors import (
    DeviceUnavailable,
    EngineFailure,
    InvalidArgument,
    LucidnnError,
    NotSupported,
    ProblemSyntaxError,
    UnknownEngine,
)
from lucidnn.core.problem import Problem
from lucidnn.testing import read_problems

X, W = torch.zeros(2, 4, 6, 6), torch.zeros(8, 4, 3, 3)


def message(call) -> str:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    assert caught.value.argument in str(caught.value) and "accepted: " in str(caught.value)
    return str(caught.value)


# ---- from the functions ------------------------------------------------------------------------------------

BAD_CALLS = {
    "rank of input": (lambda: F.conv2d(torch.zeros(4, 6), W), "input: found shape [4, 6]; accepted: 4 axes"),
    "rank of input, too many": (lambda: F.conv1d(X, W[..., 0]), "input: found shape [2, 4, 6, 6]; accepted: 3 axes"),
    "rank of weight": (lambda: F.conv2d(X, W[0]), "weight: found shape [4, 3, 3]; accepted: 4 axes"),
    "channels": (lambda: F.conv2d(X, torch.zeros(8, 3, 3, 3)), "w: found f32[8,3,3,3]@nchw; accepted: 4 channels"),
    "groups": (lambda: F.conv2d(X, W, groups=3), "groups: found 3; accepted: a divisor of x's 4 channels"),
    "groups and filters": (
        lambda: F.conv2d(X, torch.zeros(7, 2, 3, 3), groups=2),
        "groups: found 2; accepted: a divisor of w's 7 filters",
    ),
    "groups 0": (lambda: F.conv2d(X, W, groups=0), "groups: found 0; accepted: a number >= 1"),
    "padding": (lambda: F.conv2d(X, W, padding=-1), "padding: found [-1, -1]; accepted: numbers >= 0"),
    "one padding": (
        lambda: F.conv2d(X, W, padding=((0, 0), (1, -2))),
        "padding: found [0, (1, -2)]; accepted: numbers",
    ),
    "padding's length": (lambda: F.conv2d(X, W, padding=(1, 1, 1)), "padding: found (1, 1, 1); accepted: "),
    "padding's word": (lambda: F.conv2d(X, W, padding="full"), "padding: found 'full'; accepted: 'same', 'valid'"),
    "padding's type": (lambda: F.conv2d(X, W, padding=1.5), "padding: found 1.5; accepted: a whole number"),
    "padding's mode": (lambda: F.conv2d(X, W, padding=1, padding_mode="wrap"), "padding_mode: found 'wrap'; accepted"),
    "stride": (lambda: F.conv2d(X, W, stride=0), "stride: found [0, 0]; accepted: numbers >= 1"),
    "stride's length": (lambda: F.conv2d(X, W, stride=(1, 2, 3)), "stride: found (1, 2, 3); accepted: "),
    "dilation": (lambda: F.conv2d(X, W, dilation=(1, 0)), "dilation: found [1, 0]; accepted: numbers >= 1"),
    "types": (lambda: F.conv2d(X, W.double()), "w: found f64[8,4,3,3]@nchw; accepted: the data type of x, f32"),
    "integers": (lambda: F.conv2d(X.long(), W.long()), "x: found i64[2,4,6,6]@nchw; accepted: a floating-point type"),
    "complex": (lambda: F.conv2d(X.cfloat(), W.cfloat()), "dtype: found complex64; accepted: f64, f32"),
    "devices": (lambda: F.conv2d(X, W.to("meta")), "w: found a tensor on meta; accepted: cpu, where x is"),
    "bias's shape": (lambda: F.conv2d(X, W, torch.zeros(4)), "bias: found f32[4]; accepted: shape [8]"),
    "bias's type": (
        lambda: F.conv2d(X, W, torch.zeros(8).half()),
        "bias: found f16[8]; accepted: shape [8], one a filter",
    ),
    "filter too large": (
        lambda: F.conv2d(X, torch.zeros(8, 4, 3, 8)),
        "x: found f32[2,4,6,6]@nchw; accepted: at least 8 points along W with padding (it has 6)",
    ),
    "no filter": (lambda: F.conv2d(X, torch.zeros(8, 4, 0, 3)), "w: found f32[8,4,0,3]@nchw; accepted: filter sizes"),
    "activation": (lambda: F.conv2d(X, W, activation="rleu"), "activation: found 'rleu'; accepted: identity, relu,"),
    "activation's parameter": (
        lambda: F.conv2d(X, W, activation="relu", parameter=2.0),
        "activation: found relu with parameter 2.0; accepted: relu without a parameter",
    ),
    "not a tensor": (lambda: F.conv2d([[1.0]], W), "input: found list; accepted: a torch tensor"),
    "window": (lambda: F.max_pool2d(X, 0), "window: found [0, 0]; accepted: numbers >= 1"),
    "window too large": (lambda: F.max_pool2d(X, 7), "x: found f32[2,4,6,6]@nchw; accepted: an input with room"),
    "pool padding": (lambda: F.max_pool2d(X, 2, padding=2), "padding: found [2, 2]; accepted: numbers from 0 to half"),
    "pool rank": (lambda: F.max_pool2d(torch.zeros(4), 2), "input: found shape [4]; accepted: 4 axes"),
    "relu": (lambda: F.relu(torch.zeros(3, dtype=torch.int32)), "x: found i32[3]; accepted: a floating-point type"),
    "linear": (lambda: F.linear(torch.zeros(3, 4), torch.zeros(5, 6)), "weight: found [5, 6]; accepted: (out, 4)"),
}


@pytest.mark.parametrize("call, expected", BAD_CALLS.values(), ids=BAD_CALLS)
def test_functions_name_what_is_wrong(call, expected):
    assert message(call).startswith(expected) or expected in message(call)


def test_unknown_engine_lists_near_names():
    with pytest.raises(UnknownEngine) as caught:
        F.conv2d(X, W, engine="conv.referense")
    assert "found 'conv.referense'; accepted: conv.reference" in str(caught.value)
    assert isinstance(caught.value, LookupError)
    with pytest.raises(UnknownEngine), settings.using(engine="nothing like it"):
        F.relu(X)


def test_a_refused_call_leaves_nothing_behind():
    """After an error the same call with good arguments works, and nothing was remembered for the bad one."""
    from lucidnn.functional import _library

    before = len(_library._plans)
    for call, _ in BAD_CALLS.values():
        with pytest.raises(InvalidArgument):
            call()
    assert len(_library._plans) == before
    assert F.conv2d(X, W).shape == (2, 8, 4, 4)


# ---- from problem lines ------------------------------------------------------------------------------------

GOOD = "conv_fprop x=f32[2,4,6,6] w=f32[8,4,3,3]"
BAD_LINES = {
    # line: (what the caret stands under, what the message says)
    "": ("", "empty line"),
    "   ": ("", "empty line"),
    "conv_forward x=f32[1]": ("conv_forward", "operation: found 'conv_forward'; accepted: adaptive_avg_pool_bwd"),
    GOOD + " padding": ("padding", "expected name=value, found 'padding'"),
    GOOD + " padding=": ("padding=", "expected name=value"),
    GOOD + " pad=1": ("pad=1", "conv_fprop has no 'pad'; it has x, w, bias, z, scale, y, stride, padding"),
    GOOD + " padding=1,x": ("1,x", "padding: found '1,x'; accepted: numbers or before:after pairs"),
    GOOD + " padding=1:2:3": ("1:2:3", "padding: found '1:2:3'"),
    GOOD + " padding=1,1,1": ("padding=1,1,1", "padding: found [(1, 1), (1, 1), (1, 1)]; accepted: 1 or 2 values"),
    GOOD + " padding=-1": ("padding=-1", "padding: found [-1, -1]; accepted: numbers >= 0"),
    GOOD + " stride=2,": ("2,", "stride: found '2,'; accepted: numbers such as 2,1"),
    GOOD + " stride=0": ("stride=0", "stride: found [0, 0]; accepted: numbers >= 1"),
    GOOD + " groups=3": ("groups=3", "groups: found 3; accepted: a divisor of x's 4 channels"),
    GOOD + " groups=two": ("two", "groups: found 'two'; accepted: a whole number"),
    GOOD + " stride=1 stride=2": ("stride=2", "stride is given twice"),
    GOOD + " alpha=much": ("much", "alpha: found 'much'; accepted: a number"),
    GOOD + " alpha=nan": ("alpha=nan", "alpha: found nan; accepted: a finite number"),
    GOOD + " act=rleu": ("act=rleu", "activation: found 'rleu'"),
    GOOD + " act=elu:big": ("elu:big", "act: found 'elu:big'; accepted: name or name:number"),
    GOOD + " act=relu:1": ("act=relu:1", "relu without a parameter"),
    GOOD + " beta=2.0": ("beta=2.0", "beta: found 2.0; accepted: a number other than 0 exactly where z is given"),
    GOOD + " z=f32[2,8,4,4]": ("z=f32[2,8,4,4]", "beta: found 0.0"),
    GOOD + " z=f32[2,8,4,5] beta=1.0": ("z=f32[2,8,4,5]", "z: found f32[2,8,4,5]@nchw; accepted: shape [2, 8, 4, 4]"),
    GOOD + " bias=f32[4]": ("bias=f32[4]", "bias: found f32[4]; accepted: shape [8]"),
    GOOD + " math=fast": ("math=fast", "math: found fast; accepted: ieee, tf32 for conv_fprop"),
    GOOD + " on=cuda:90": ("cuda:90", "target: found 'cuda:90'; accepted: "),
    GOOD + " y=f32[2,8,5,4]": ("y=f32[2,8,5,4]", "y: found f32[2,8,5,4]@nchw; accepted: shape [2, 8, 4, 4]"),
    GOOD + " y=f32[2,8,4,4]@(0,16,4,1)": ("y=f32[2,8,4,4]@(0,16,4,1)", "accepted: an output whose elements do not"),
    GOOD + " dy=f32[1]": ("dy=f32[1]", "conv_fprop has no 'dy'"),
    "conv_fprop x=f32[2,4,6,6]": ("conv_fprop", "w: found nothing; accepted: a tensor: conv_fprop reads x, w"),
    "conv_fprop x=f33[2,4,6,6] w=f32[8,4,3,3]": ("f33[2,4,6,6]", "dtype: found f33; accepted: f64, f32"),
    "conv_fprop x=f32[2,4,6,6 w=f32[8,4,3,3]": ("f32[2,4,6,6", "tensor: found 'f32[2,4,6,6'; accepted: dtype[n,c,...]"),
    "conv_fprop x=f32[2,-4,6,6] w=f32[8,4,3,3]": ("f32[2,-4,6,6]", "tensor: found"),
    "conv_fprop x=f32[2,4,6,6]@nwc w=f32[8,4,3,3]": ("f32[2,4,6,6]@nwc", "layout: found 'nwc'; accepted: nchw or nhwc"),
    "conv_fprop x=f32[2,4,6,6]@(1,2) w=f32[8,4,3,3]": ("f32[2,4,6,6]@(1,2)", "strides: found [1, 2]; accepted: 4"),
    "conv_fprop x=f32[2,4,6,6]%3 w=f32[8,4,3,3]": ("f32[2,4,6,6]%3", "alignment: found 3; accepted: 1, 2, 4"),
    "conv_fprop x=f32[2,4,6,6] w=f32[8,4,3]": ("w=f32[8,4,3]", "w: found f32[8,4,3]@ncw; accepted: 4 axes as x="),
    "conv_fprop x=f32[2,4] w=f32[8,4]": ("x=f32[2,4]", "x: found f32[2,4]@nc; accepted: 3, 4 or 5 axes"),
    "conv_fprop x=f32[2,4,6,6] w=f16[8,4,3,3]": ("w=f16[8,4,3,3]", "w: found f16[8,4,3,3]@nchw; accepted: the"),
    "conv_fprop x=f32[2,4,2,6] w=f32[8,4,3,3]": ("x=f32[2,4,2,6]", "accepted: at least 3 points along H"),
    "conv_wgrad x=f32[2,4,6,6] dy=f32[2,8,4,4] act=relu": ("act=relu", "conv_wgrad has no such epilogue"),
    "conv_dgrad dy=f32[2,8,4,4] w=f32[8,4,3,3] act=identity:2": ("act=identity:2", "identity without a parameter"),
    GOOD + " padding=1 padding_mode=wrap": ("padding_mode=wrap", "accepted: zeros, reflect, replicate, circular"),
    GOOD + " padding=6 padding_mode=reflect": ("padding=6", "at most 5 along H in mode reflect"),
    GOOD + " scale=f32[4]": ("scale=f32[4]", "scale: found f32[4]; accepted: type f32 and shape [1] or [8]"),
    GOOD + " y=i8[2,8,4,4]": ("y=i8[2,8,4,4]", "y: found i8[2,8,4,4]@nchw; accepted: a floating-point type"),
    "conv_fprop x=i8[2,4,6,6] w=i8[8,4,3,3] alpha=2": ("conv_fprop", "another type than i32, which holds bare sums"),
    "conv_dgrad dy=i8[2,8,4,4] w=i8[8,4,3,3]": ("dy=i8[2,8,4,4]", "dy: found i8[2,8,4,4]@nchw; accepted: a floating"),
    "conv_dgrad dy=f32[2,8,4,4] w=f32[8,4,3,3] dx=f32[2,4,6,7]": ("dy=f32[2,8,4,4]", "dy: found f32[2,8,4,4]@nchw"),
    "conv_bgrad dy=f32[2,8] db=f32[9]": ("db=f32[9]", "db: found f32[9]; accepted: shape [8]"),
    "conv_bgrad dy=f32[2,8] math=tf32": ("math=tf32", "math: found tf32; accepted: ieee for conv_bgrad"),
    "max_pool_fwd x=f32[2,4,6,6]": ("max_pool_fwd", "window: found nothing; accepted: 1 or 2 sizes"),
    "max_pool_fwd x=f32[2,4,6,6] window=2 ceil_mode=2": ("2", "ceil_mode: found '2'; accepted: 0 or 1"),
    "max_pool_fwd x=f32[2,4,6,6] window=2 index_type=i8": ("index_type=i8", "index_type: found i8; accepted: none"),
    "max_pool_fwd x=f32[2,4,66,66] window=17 index_type=u8": ("index_type=u8", "accepted: i32 or i64 for a window"),
    "pointwise_fwd x=f32[4] bias=f32[4]": ("bias=f32[4]", "accepted: no bias: x has no channel axis"),
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_problem_lines_point_at_the_token(line):
    token, expected = BAD_LINES[line]
    with pytest.raises(ProblemSyntaxError) as caught:
        Problem.parse(line)
    first, *_, shown, caret = str(caught.value).split("\n")
    assert expected in first
    assert shown == "  " + line
    assert caret.strip() == "^" and caret.index("^") - 2 == caught.value.position
    assert line[caught.value.position :].startswith(token)
    if token and len(token) > 1:
        assert caught.value.position == line.rindex(token)


def test_a_problem_file_names_file_and_line(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text(f"# a comment\n\n{GOOD}  # another\n{GOOD} padding=x\n")
    with pytest.raises(ProblemSyntaxError, match=r"some\.txt:4: padding: found 'x'"):
        read_problems(path)
    path.write_text(f"# a comment\n\n{GOOD}  # another\n")
    assert read_problems(path) == [Problem.parse(GOOD)]


# ---- the classes -------------------------------------------------------------------------------------------

EVERY = [
    InvalidArgument("groups", 3, "a divisor"),
    ProblemSyntaxError("conv_fprop x=1", 11, "no"),
    UnknownEngine("engine: found 'a'"),
    NotSupported("no engine takes it", {"a.b": ["needs x, found y", "needs z, found w"]}),
    DeviceUnavailable("device 'cuda'"),
    EngineFailure("failed"),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_survive_a_process_border(error, through):
    again = through(error)
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
    assert isinstance(again, LucidnnError)


def test_not_supported_lists_every_reason():
    error = EVERY[3]
    assert str(error).splitlines() == ["no engine takes it", "  a.b: needs x, found y", "  a.b: needs z, found w"]
    assert error.refusals == {"a.b": ("needs x, found y", "needs z, found w")}


def test_a_named_engine_that_refuses_gives_its_reasons():
    with pytest.raises(NotSupported) as caught:
        F.conv2d(X, W, engine="conv.empty")
    assert "engine conv.empty does not take conv_fprop x=f32[2,4,6,6]@nchw" in str(caught.value)
    assert caught.value.refusals == {"conv.empty": tuple(registry.get("conv.empty").reasons(Problem.parse(GOOD)))}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_one_clear_line():
    from lucidnn.core.target import Target

    with pytest.raises(DeviceUnavailable) as caught:
        Target.of("cuda")
    assert str(caught.value) == "device 'cuda': this machine has no usable NVIDIA or AMD GPU; use device 'cpu'"


@pytest.mark.gpu
def test_mixed_devices():
    text = message(lambda: F.conv2d(X.cuda(), W))
    assert text == "w: found a tensor on cpu; accepted: cuda:0, where x is"
    text = message(lambda: F.conv2d(X.cuda(), W.cuda(), torch.zeros(8)))
    assert text == "bias: found a tensor on cpu; accepted: cuda:0, where x is"
    with pytest.raises(DeviceUnavailable, match=r"device 'cuda:99': this machine has \d+ GPU"):
        from lucidnn.core.target import Target

        Target.of("cuda:99")
