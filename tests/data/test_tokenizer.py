import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from sentencepiece import SentencePieceTrainer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from data.sources import stdlib_documents
from data.tokenizer import BOS, EOS, JsonTokenizer, load_tokenizer, stdlib_tokenizer
from errors import UserError

ROOT = Path(__file__).parents[2]
TEXT = 'def f(x):\n\treturn "naïve 東京 🙂"  # <|end_of_text|></s>\r\n\x00'


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return stdlib_tokenizer(512, tmp_path_factory.mktemp("cache"))


def byte_level(*special: str, template: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the theme of the thesis"] * 3, trainer)
    if template:
        first = special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    return tokenizer


def test_stdlib_tokenizer_round_trip(trained, rng):
    assert (trained.vocab_size, trained.bos_id, trained.eos_id) == (512, 0, 1)
    noise = "".join(chr(rng.randrange(0x20, 0xD800)) for _ in range(200))
    documents = stdlib_documents(held_out=True)
    for text in (TEXT, noise, "", documents.text(rng.randrange(len(documents)))):
        ids = trained.encode(text)
        assert trained.decode(ids) == text
        assert not {trained.bos_id, trained.eos_id} & set(ids)
    assert trained.encode_batch([TEXT, noise]) == [trained.encode(TEXT), trained.encode(noise)]
    assert trained.decode([0, *trained.encode("a"), 1]) == f"{BOS}a{EOS}"
    assert len(trained.encode("    return self.")) < 8  # It learned from Python.


def test_stdlib_tokenizer_is_kept_and_the_same_for_racing_processes(trained, tmp_path):
    program = (
        "import sys; from pathlib import Path; from data.tokenizer import stdlib_tokenizer;"
        "print(stdlib_tokenizer(512, Path(sys.argv[1])).fingerprint)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path / "new"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    assert [run.communicate()[0].strip() for run in runs] == [trained.fingerprint] * 2
    (kept,) = (tmp_path / "new").iterdir()
    assert "512" in kept.name
    before = kept.stat().st_mtime_ns
    assert stdlib_tokenizer(512, tmp_path / "new").path == str(kept)
    assert kept.stat().st_mtime_ns == before


def test_the_cache_folder_comes_from_the_environment(trained, tmp_path, monkeypatch):
    name = Path(trained.path).name
    for variable, folder in (
        ("ROWHOUSE_CACHE", tmp_path / "a"),
        ("XDG_CACHE_HOME", tmp_path / "b" / "rowhouse"),
    ):
        monkeypatch.delenv("ROWHOUSE_CACHE", raising=False)
        monkeypatch.setenv(variable, str(folder if variable == "ROWHOUSE_CACHE" else folder.parent))
        folder.mkdir(parents=True)
        (folder / name).write_bytes(Path(trained.path).read_bytes())
        assert stdlib_tokenizer(512).path == str(folder / name)


def test_stdlib_tokenizer_refuses(tmp_path):
    with pytest.raises(UserError, match="258 or more"):
        stdlib_tokenizer(257, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="ROWHOUSE_CACHE"):
        stdlib_tokenizer(300, tmp_path / "file")


def test_tokenizer_json_with_a_template_and_truncation(tmp_path):
    """What a tokenizer.json says of bos and of length is for other uses than pre-training."""
    tokenizer = byte_level("<s>", "</s>", template=True)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(path))
        assert loaded.path == str(tmp_path / "tokenizer.json")
        assert (loaded.bos_id, loaded.eos_id) == (0, 1)
        assert loaded.decode(loaded.encode(TEXT)) == TEXT
        assert loaded.decode(loaded.encode_batch(["a", TEXT])[1]) == TEXT


@pytest.mark.parametrize("eos", ["<|fin|>", {"content": "<|fin|>", "lstrip": False}])
def test_bos_and_eos_of_other_names(tmp_path, eos):
    byte_level("<|debut|>", "<|fin|>").save(str(tmp_path / "tokenizer.json"))
    without = load_tokenizer(str(tmp_path))
    assert (without.bos_id, without.eos_id) == (None, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": eos}))
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.bos_id, loaded.eos_id) == (None, 1)
    assert loaded.fingerprint != without.fingerprint


def test_gpt2_names(tmp_path):
    byte_level("<|endoftext|>").save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.bos_id, loaded.eos_id) == (None, 0)


def test_vocab_size_covers_ids_with_gaps(tmp_path):
    content = json.loads(byte_level("<s>", "</s>").to_str())
    content["model"]["vocab"] = {token: 2 * i for token, i in content["model"]["vocab"].items()}
    content["added_tokens"][1]["id"] = 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_tokenizer(str(tmp_path))
    assert max(loaded.encode("the theme")) < loaded.vocab_size
    assert loaded.vocab_size % 2 == 1


def test_sentencepiece(tmp_path, rng):
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(100)]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(300)))
    SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        loaded = load_tokenizer(str(path))
        assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (300, 1, 2)
        text = " ".join(rng.choices(words, k=20)) + "  東 </s> <s>\n"
        ids = loaded.encode(text)
        assert loaded.decode(ids) == text
        assert not {1, 2} & set(ids)
        assert loaded.encode_batch([text, "a"]) == [ids, loaded.encode("a")]


def test_tokenizers_that_cannot_be_loaded(tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer_path.*absent"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(UserError, match="neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(str(tmp_path))
    ranks = [base64.b64encode(bytes([i, i])).decode() + f" {i}\n" for i in range(9)]
    (tmp_path / "tokenizer.model").write_text("".join(ranks))
    with pytest.raises(UserError, match="tiktoken.*tokenizer.json of the model's Hugging Face"):
        load_tokenizer(str(tmp_path))
    for name in ("broken.model", "broken.json"):
        (tmp_path / name).write_bytes(b"\n\x05nothing")
        with pytest.raises(UserError, match=f"{name}.*cannot be read"):
            load_tokenizer(str(tmp_path / name))
    byte_level("<s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json"):
        load_tokenizer(str(tmp_path))


def test_fingerprint_follows_the_content_and_not_the_place(trained, tmp_path):
    copy = tmp_path / "moved.json"
    copy.write_bytes(Path(trained.path).read_bytes())
    assert JsonTokenizer(copy).fingerprint == trained.fingerprint
    byte_level(BOS, EOS).save(str(copy))
    assert JsonTokenizer(copy).fingerprint != trained.fingerprint
