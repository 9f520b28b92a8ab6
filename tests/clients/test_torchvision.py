"""Detectors of torchvision train unmodified. Where its compiled `nms` does not load, the tests use their own.

Guards: casting/op_patches, lists/float16.yaml.
"""

import sys

import pytest
import torch
from torch import nn
from training import take_step

import amp_patch as amp

torchvision = pytest.importorskip("torchvision", reason="needs torchvision: make test-clients")

from torchvision.models import detection  # noqa: E402
from torchvision.models.detection.anchor_utils import AnchorGenerator  # noqa: E402
from torchvision.ops import MultiScaleRoIAlign, nms  # noqa: E402

SIZES = {"min_size": 64, "max_size": 64}
FEW = {"box_detections_per_img": 4}


def make_backbone():
    layers = []
    for before, after in ((3, 16), (16, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 32
    return backbone


def make(name):
    torch.manual_seed(0)
    if name == "retinanet":
        anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0),))
        return detection.RetinaNet(make_backbone(), 3, anchor_generator=anchors, score_thresh=0.001, **SIZES)
    if name == "fcos":
        anchors = AnchorGenerator(((16,),), ((1.0,),))
        return detection.FCOS(make_backbone(), 3, anchor_generator=anchors, score_thresh=0.001, **SIZES)
    anchors, pool = AnchorGenerator(((16, 32),), ((1.0,),)), MultiScaleRoIAlign(["0"], 4, 1)
    options = {"rpn_anchor_generator": anchors, "box_roi_pool": pool, **SIZES, **FEW}
    if name == "faster_rcnn":
        return detection.FasterRCNN(make_backbone(), 3, **options)
    return detection.MaskRCNN(make_backbone(), 3, mask_roi_pool=MultiScaleRoIAlign(["0"], 4, 1), **options)


def make_batch():
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(3, 64, 64, generator=generator) for _ in range(2)]
    boxes = torch.tensor([[8.0, 8.0, 30.0, 36.0], [20.0, 24.0, 60.0, 56.0]])
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[0, 8:36, 8:30] = masks[1, 24:56, 20:60] = 1
    return images, [{"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks} for _ in images]


@pytest.fixture(autouse=True)
def ops_without_kernels(monkeypatch):
    """Where torchvision's kernels are not, `nms` is ours, and `roi_align` torchvision's own in Python, uncompiled."""
    if not torchvision.extension._has_ops():
        module = sys.modules["torchvision.ops.roi_align"]
        monkeypatch.setattr(torchvision.extension, "_has_ops", lambda: True)
        monkeypatch.setattr(module, "_roi_align", module._roi_align.__wrapped__)


def run(name, level, *, detects=True, **options):
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    losses = []
    for step in range(4):
        torch.manual_seed(step)  # boxes are sampled
        loss = sum(model(*make_batch()).values())
        take_step(loss, optimizer)
        losses.append(loss.item())
    found = model.eval()(make_batch()[0]) if detects else []
    amp.reset()
    return losses, found


def assert_near_float32(name, level, nearness, **options):
    with_lists = level in ("O1", "O4")  # without, boxes and scores have 16 bits, which nms does not take on a CPU
    losses, found = run(name, level, detects=with_lists, **options)
    expected, expected_found = run(name, "O0", detects=with_lists)
    assert losses != expected and losses == pytest.approx(expected, rel=nearness)
    assert losses[-1] < losses[0]
    for one, other in zip(found, expected_found, strict=True):
        assert len(one["boxes"]) and (one["boxes"].dtype is torch.float32 or name == "fcos")  # whose coder casts them
        assert one["scores"][0].item() == pytest.approx(other["scores"][0].item(), rel=0.05)


SCALE = {"loss_scale": 2.0**4}


@pytest.mark.parametrize(("level", "options"), [("O1", SCALE), ("O2", SCALE), ("O4", {}), ("O5", {})])
@pytest.mark.parametrize("name", ["retinanet", "fcos"])
def test_detectors_of_one_stage(name, level, options):
    if (name, level) == ("fcos", "O2"):
        pytest.skip("the eps of its loss, 1e-7, is 0 in float16: 0 / 0")
    assert_near_float32(name, level, 0.01, **options)


@pytest.mark.parametrize(("level", "options"), [("O1", SCALE), ("O4", {})])
@pytest.mark.parametrize("name", ["faster_rcnn", pytest.param("mask_rcnn", marks=pytest.mark.slow)])
def test_detectors_of_two_stages(name, level, options):
    """Whose first stage may choose other boxes once it is rounded."""
    assert_near_float32(name, level, 0.05, **options)


def test_nms_takes_scores_and_boxes_of_two_dtypes():
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]])
    scores = torch.tensor([0.5, 0.75, 0.25])
    with pytest.raises(RuntimeError, match="same type"):
        nms(boxes, scores.bfloat16(), 0.5)
    amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    assert torchvision.ops.nms(boxes, scores.bfloat16(), 0.5).tolist() == [1, 2]
