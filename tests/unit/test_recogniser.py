"""Changes of a recogniser's file: the best classes of each step, their probabilities, and the characters."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from nereid.base.errors import WrongUsage
from nereid.base.units import split_lines
from nereid.models.publish.importing.adaptation import NetworkChoices
from nereid.tasks.read.characters import Characters
from nereid.tasks.read.dictionary import characters_of
from nereid.tasks.read.recogniser import adapt, adapt_file
from tests.networks import value
from tests.recognisers import CHARACTERS, TestRecogniser
from tests.tables import cases

OUTPUTS = ("index", "probability", "next_index", "next_probability")
LINES = np.random.default_rng(3).uniform(-1, 1, (2, 3, 48, 64)).astype(np.float32)


@cases(
    "recogniser",
    axes_are_an_input=TestRecogniser(opset=18),
    FP16=TestRecogniser(datatype="FP16"),
    FP64=TestRecogniser(datatype="FP64", opset=18),
    fixed_batch=TestRecogniser(batch=1),
    any_height=TestRecogniser(shape=(3, "H", "W")),
    no_space=TestRecogniser(classes=len(CHARACTERS) + 1),
    steps_first=TestRecogniser(output="T,N"),
    steps_first_fixed_batch=TestRecogniser(output="T,1", batch=1),
    probabilities_in_an_old_opset=TestRecogniser(has_softmax=True, opset=11),
)
def test_best_classes_of_each_step(tmp_path, recogniser):
    onnx.save(recogniser.build(), tmp_path / "model.onnx")

    activation = "none" if recogniser.has_softmax else "softmax"
    outputs, changes, _ = adapt_file(tmp_path / "model.onnx", activation=activation)

    assert outputs == OUTPUTS
    assert changes
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_inputs()[0].shape[1:3] == [3, 48]
    tensors, expected = session.run(None, {"x": LINES}), recogniser.probabilities(LINES)
    assert [tensor.dtype for tensor in tensors] == [np.int64, np.float32] * 2
    # The classes are rounded to half precision in the one with FP16.
    tolerance = 5e-3 if recogniser.datatype == "FP16" else 1e-5
    for rank, (index, probability) in enumerate((tensors[:2], tensors[2:]), 1):
        assert index.tolist() == expected.argsort(2)[:, :, -rank].tolist()
        np.testing.assert_allclose(probability, np.sort(expected, 2)[:, :, -rank], rtol=tolerance)


def test_changed_file_stays_as_it_is():
    model = TestRecogniser(has_softmax=True).build()
    adapt(model)
    before = model.SerializeToString()

    outputs, changes, _ = adapt(model)

    assert (outputs, changes) == (OUTPUTS, [])
    assert model.SerializeToString() == before
    with pytest.raises(WrongUsage, match=r"append a softmax: .* fix: --activation none if 'probability'"):
        adapt(model, activation="softmax")


def test_given_characters_are_written_to_the_file(tmp_path):
    onnx.save(TestRecogniser(characters=()).build(), tmp_path / "model.onnx")

    changes = adapt_file(tmp_path / "model.onnx", choices=NetworkChoices(labels=CHARACTERS)).changes

    assert "5 characters are written to the metadata 'character'" in changes
    assert characters_of(onnx.load(tmp_path / "model.onnx")) == CHARACTERS
    characters = Characters.from_file(tmp_path / "model.onnx")
    ((text, *_),) = characters.decode(np.array([[1, 0, 4, 6]]), np.ones((1, 4), np.float32))
    assert text == "a\u2028 "


@cases("names", two=("best", "sure"), four=("best", "sure", "other", "less_sure"))
def test_tensors_get_the_names_of_the_current_version(tmp_path, names):
    """A version from before a recogniser returned the second best class has two outputs."""
    onnx.save(TestRecogniser().build(), tmp_path / "model.onnx")

    assert adapt_file(tmp_path / "model.onnx", names=("lines", *names)).outputs == names
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    tensor_names = [tensor.name for tensor in (*session.get_inputs(), *session.get_outputs())]
    assert tensor_names == ["lines", *names, *OUTPUTS[len(names) :]]


def only_best(model):
    """Adapt a model as it was done before the second best class was returned."""
    adapt(model)
    del model.graph.output[2:]
    return model


def test_file_with_the_best_class_only_does_not_replace_one_with_two(tmp_path):
    onnx.save(only_best(TestRecogniser(has_softmax=True).build()), tmp_path / "model.onnx")

    assert adapt_file(tmp_path / "model.onnx").outputs == OUTPUTS[:2]
    with pytest.raises(WrongUsage, match="expected the outputs a, b, c, d of the current version, got only"):
        adapt_file(tmp_path / "model.onnx", names=("lines", *"abcd"))


ONE_INPUT = r"expected one input for lines of text, FP32 \[N,3,48,width\] with any width, got 'x' FLOAT "
COUNT = "expected 6 characters, or 5 and a space, for the 7 classes of output 'classes', .* got {} from {}"
BARE = TestRecogniser(characters=())


@cases(
    fixed_width=(TestRecogniser(shape=(3, 48, 320)), (), ONE_INPUT + r"\[-1,3,48,320\]"),
    no_characters=(BARE, (), "expected the characters .* fix: --labels"),
    too_few=(BARE, ("a", "b"), COUNT.format(2, "--labels; fix: --labels")),
    wrong_metadata=(TestRecogniser(characters=("a",)), (), COUNT.format(1, "the file's metadata")),
    others=(TestRecogniser(), ("a",), "expected the 5 characters of .*, got 1 others from --labels"),
    empty_line=(BARE, ("a", "", "c", "d", "e"), "line of --labels, got an empty line 2; fix: remove"),
    blank=(BARE, ("<blank>", *CHARACTERS), "line 1 of --labels, got '<blank>'; fix: remove that line"),
)
def test_file_that_does_not_fit_is_wrong_usage(recogniser, labels, message):
    with pytest.raises(WrongUsage, match=message):
        adapt(recogniser.build(), NetworkChoices(labels=labels))


def test_several_outputs_need_a_choice():
    model = TestRecogniser(has_softmax=True).build()
    model.graph.output.append(value("logits", "FP32", ["N", "T", 7]))

    with pytest.raises(WrongUsage, match=r"expected one output .* got 'classes' FLOAT .* fix: .* --output"):
        adapt(model)

    assert adapt(model, NetworkChoices(output="classes"))[0] == OUTPUTS


@cases(
    CR_LF=("a\r\nb\r\n", ["a", "b"]),
    empty_lines_at_the_end=("a\nb\n\n\n", ["a", "b"]),
    space_at_the_end=("a\n \n", ["a", " "]),
    other_line_breaks=("a\u2028\n\u0085", ["a\u2028", "\u0085"]),
    empty_line=("\na", ["", "a"]),
    nothing=("\n", []),
)
def test_lines_of_a_dictionary(text, found):
    assert split_lines(text) == found


@cases(
    space=(TestRecogniser(), (), []),
    space_with_a_line=(BARE, (*CHARACTERS, " "), []),
    no_space=(BARE, (*CHARACTERS, "d"), ["the 7 classes are the blank and 6 characters, without a"]),
)
def test_notes_about_characters(recogniser, labels, notes):
    """A list may be shifted by a line, which no check can find."""
    texts = adapt(recogniser.build(), NetworkChoices(labels=labels)).notes

    assert [text[: len(note)] for text, note in zip(texts, notes, strict=True)] == notes


def test_best_classes_may_come_in_either_order():
    model = only_best(TestRecogniser(has_softmax=True).build())
    index, probability = list(model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend([probability, index])

    adaptation = adapt(model)

    assert adaptation.outputs == ("index", "probability")
    assert [note.split(",")[0] for note in adaptation.notes] == ["the number of characters cannot be checked"]


def test_old_file_with_weights_as_inputs_can_be_opened(tmp_path):
    """Before IR version 4, each initializer had to be an input, too."""
    model = TestRecogniser(opset=9, batch=1).build()
    model.ir_version = 3
    for weight in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    onnx.save(model, tmp_path / "model.onnx")

    adapt_file(tmp_path / "model.onnx", activation="softmax")

    onnx.checker.check_model(tmp_path / "model.onnx")
    index, *_ = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": LINES})
    assert index.tolist() == TestRecogniser().probabilities(LINES).argmax(2).tolist()
