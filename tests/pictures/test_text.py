"""trace hf:DIRECTORY --text: the input are the ids that the tokenizer gives, and the axes bear its tokens."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny BERT with a tokenizer of words."""
    place = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(place)
    transformers.BertConfig(
        vocab_size=len(words), hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16
    ).save_pretrained(place)
    return place


def test_the_text_is_the_input_and_labels_the_axes(invoke, directory):
    out = invoke("trace", f"hf:{directory}", "--text", "the cat sat", "--picture", "weights", "--attention", "2").out
    assert "input_ids int64 [1, 5]" in out
    assert "batch heads query key" in out  # a batch of one has its name
    lines = out[out.index("query ↓") :].split("\n")
    assert [line.split()[0] for line in lines[1:6]] == ["[CLS]", "the", "cat", "sat", "[SEP]"]


def test_other_words_are_another_input(invoke, directory):
    line = ("trace", f"hf:{directory}", "--format", "json", "--values", "--text")
    one, other = (invoke(*line, text).out for text in ("the cat sat", "the mat sat"))
    assert one != other
    assert one == invoke(*line, "the cat sat").out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--text", "a"), "--text needs a tokenizer: name a model with one"),
        (("torch.nn:Linear", "--text", "a"), "--text needs a tokenizer: name a model with one"),
        (("hf:bert", "--text", "a"), "--text needs a tokenizer, and hf:bert has none"),
        (("hf:bert", "--text", "a", "--seq-len", "3"), "--text and --seq-len both set the input"),
    ],
)
def test_where_there_is_no_tokenizer(invoke, line, said):
    code, out, err = invoke("trace", *line)
    assert (code, out) == (2, "")
    assert said in err


def test_a_directory_without_a_tokenizer(invoke, tmp_path):
    transformers.BertConfig(hidden_size=12, num_attention_heads=3).save_pretrained(tmp_path)
    code, out, err = invoke("trace", f"hf:{tmp_path}", "--text", "a")
    assert (code, out) == (2, "")
    assert "has no tokenizer. Save one there" in err
