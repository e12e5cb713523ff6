"""Exports of Ultralytics with few weights, added without an option: its own boxes within a pixel."""

import pytest

from tests import real_exports

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return real_exports.unpack(tmp_path_factory.mktemp("exports"))


@pytest.mark.parametrize("axes", real_exports.AXES)
@pytest.mark.parametrize("family", real_exports.ULTRALYTICS)
def test_boxes_are_those_of_ultralytics(exported, tmp_path, family, axes):
    real_exports.assert_same_objects(exported, family, axes, tmp_path / "models")
