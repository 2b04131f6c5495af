"""Descriptors: the text form, layouts derived from strides, and what of a real tensor they keep."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from lucidnn.core.descriptor import DTYPES, TensorDescriptor, is_channels_last, short_dtype
from lucidnn.core.errors import InvalidArgument

TEXTS = {
    "f32[2,3,4,5]": "f32[2,3,4,5]@nchw",
    "f32[2,3,4,5]@nchw": "f32[2,3,4,5]@nchw",
    "f32[2,3,4,5]@nhwc": "f32[2,3,4,5]@nhwc",
    "f32[2,3,4,5]@(60,20,5,1)": "f32[2,3,4,5]@nchw",
    "f32[2,3,4,5]@(60,1,15,3)": "f32[2,3,4,5]@nhwc",
    "f32[2,3,4,5]@(60,1,15,3)%4": "f32[2,3,4,5]@nhwc%4",
    "f32[2,3,4,5]@(0,20,5,1)": "f32[2,3,4,5]@(0,20,5,1)",
    "f32[2,3,4,5]%16": "f32[2,3,4,5]@nchw",
    "f32[1,3,4,5]@(7,20,5,1)": "f32[1,3,4,5]@nchw",  # an axis of one point has no stride
    "f32[2,3,1,1]@(3,1,9,9)": "f32[2,3,1,1]@nchw",  # one pixel: both layouts, so the first
    "f32[2,1,4,5]@nhwc": "f32[2,1,4,5]@nchw",  # one channel likewise
    "f32[2,3,1,5]@(15,1,99,3)": "f32[2,3,1,5]@nhwc",
    "f32[2,3,1,5]@(45,1,99,9)": "f32[2,3,1,5]@(45,1,1,9)",
    "bf16[3]": "bf16[3]",
    "bf16[3]@(2)": "bf16[3]@(2)",
    "f64[]": "f64[]",
    "f64[]@()": "f64[]",
    "i64[2,3]": "i64[2,3]@nc",
    "u8[2,3,4]@nwc": "u8[2,3,4]@nwc",
    "f16[2,3,4,5,6]@ndhwc": "f16[2,3,4,5,6]@ndhwc",
    "f16[1,2,3,4,5,6]": "f16[1,2,3,4,5,6]",
    "f32[0,3,4,4]@nhwc": "f32[0,3,4,4]@nchw",  # no element: strides mean nothing
    "f32[2,0,4,4]@(1,2,3,4)": "f32[2,0,4,4]@nchw",
}


@pytest.mark.parametrize("text", TEXTS)
def test_text(text):
    t = TensorDescriptor.parse(text)
    assert str(t) == TEXTS[text] and repr(t) == f"TensorDescriptor({TEXTS[text]!r})"
    again = TensorDescriptor.parse(str(t))
    assert again == t and hash(again) == hash(t) and pickle.loads(pickle.dumps(t)) == t


BAD = [
    "", "f32", "f32[", "f32[2", "f32[2,]", "f32[,2]", "f32[2.5]", "f32[2]@", "f32[2]@(1", "f32[2]@(1,2)", "f32[2]@nchw",
    "f32[2]%", "f32[2]%5", "f32[2]%0", "f32[2]%32", "f33[2]", "float[2]", "f32[2,3]@nhwc", "f32[-1]", "f32[2]@(-1)",
    "f32 [2]", "f32[2]@(1)x", "f32[2]@()", "@nchw", "f32[2]%4@(1)",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_text(text):
    with pytest.raises(InvalidArgument, match="accepted: "):
        TensorDescriptor.parse(text)


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_has_three_names(name):
    long = DTYPES[name][0]
    assert short_dtype(name) == short_dtype(long) == short_dtype(getattr(torch, long)) == name
    t = torch.empty(3, dtype=getattr(torch, long))
    assert TensorDescriptor.of(t).itemsize == t.element_size() and TensorDescriptor.of(t).dtype == name


def test_of_a_tensor():
    base = torch.zeros(4, 6, 8, 10)
    cases = {
        "f32[4,6,8,10]@nchw": base,
        "f32[4,6,8,10]@nhwc": base.contiguous(memory_format=torch.channels_last),
        "f32[4,6,8,5]@(480,80,10,2)": base[..., ::2],
        "f32[4,5,8,10]@(480,80,10,1)": base[:, 1:],
        "f32[4,6,8,9]@(480,80,10,1)%4": base[..., 1:],
        "f32[4,6,8,8]@(480,80,10,1)%8": base[..., 2:],
        "f32[6,4,8,10]@(80,480,10,1)": base.transpose(0, 1),
        "f32[7,4,6,8]@(0,480,80,10)": base[..., 0].expand(7, 4, 6, 8),
        "f16[3]%2": torch.zeros(4, dtype=torch.float16)[1:],
        "f32[]": torch.zeros(()),
        "f32[0,3]@nc": torch.zeros(0, 3),
        "f32[2,3]@nc": torch.zeros(2, 3, device="meta"),
    }
    for text, tensor in cases.items():
        assert str(TensorDescriptor.of(tensor)) == text


def test_layouts_agree_with_the_framework():
    """Dense tensors in both formats are told apart wherever the strides can tell, and as the framework tells them."""
    for shape in itertools.product((0, 1, 2, 3), repeat=4):
        first = torch.empty(shape)
        last = torch.empty(shape, memory_format=torch.channels_last)
        assert TensorDescriptor.of(first).is_contiguous and not TensorDescriptor.of(first).is_channels_last
        d = TensorDescriptor.of(last)
        really = last.is_contiguous(memory_format=torch.channels_last) and not last.is_contiguous()
        assert d.is_channels_last == is_channels_last(last.shape, last.stride()) == really
        assert d.is_contiguous == last.is_contiguous() and d.layout in ("nchw", "nhwc")


def test_span_reach_and_overlap():
    def t(text):
        return TensorDescriptor.parse(text)

    assert (t("f32[2,3]").span, t("f32[2,3]@(10,2)").span, t("f32[5,3]@(0,1)").span) == (6, 15, 3)
    assert (t("f32[2,0]").span, t("f32[]").span, t("f32[5,3]@(0,1)").nbytes) == (0, 1, 12)
    assert t("f32[3,3]@(2,1)").is_overlapping and t("f32[2]@(0)").is_overlapping
    assert not t("f32[3,2]@(2,1)").is_overlapping and not t("f32[1,3]@(0,1)").is_overlapping
    assert not t("f32[0,3]@(0,0)").is_overlapping and not t("f32[2,3]@(1,2)").is_overlapping
    assert t("i8[70000,70000]").span > 2**31


@pytest.mark.parametrize("text", ["f32[3,4]@(1,3)", "f32[3,4]@(2,1)", "f32[4,3,2]@(1,4,12)", "f32[2,2,3]@(3,3,2)"])
def test_overlap_is_exact_enough(text):
    """No overlap is ever missed; what is called overlapping either is, or interleaves in a way no view of ours does."""
    t = TensorDescriptor.parse(text)
    places = [
        sum(i * s for i, s in zip(index, t.strides, strict=True)) for index in itertools.product(*map(range, t.shape))
    ]
    if len(set(places)) < len(places):
        assert t.is_overlapping
