"""Loading, converting, training and identifying tokenizers.

Every tokenizer becomes a Hugging Face fast tokenizer that `AutoTokenizer` loads. sentencepiece models are
converted here, because the conversion of transformers ranks merges by id instead of by score and drops the
dummy prefix. Its ids differ from sentencepiece on real text, for example on lines that start with a space.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from emo.common.errors import UserError, one_line
from emo.common.io.files import sha256
from emo.common.io.hub import hub_directory
from emo.common.io.untrusted import parse_json, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"  # sentencepiece writes a space as this sign
ADDED = "added_tokens.json"
VOCABULARIES = ("tokenizer.model", "vocab.json", "merges.txt")  # possible sources of a tokenizer.json
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *VOCABULARIES, ADDED]
CHAT_TEMPLATE = "chat_template.jinja"  # in older tokenizers it is in tokenizer_config.json
FILE_BYTES = 256 << 20  # largest file of a tokenizer. The largest published ones have 35 MB
MAX_IDS = 1 << 24
TRAINING_CHARS = 50_000_000  # most characters to train a tokenizer on
# Types of sentencepiece pieces.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
BYTE = 6
# Settings of a tokenizer that do not change the ids of a text, and a check of their values.
NEUTRAL_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "padding_side": ("left", "right").__contains__,
    "truncation_side": ("left", "right").__contains__,
    "model_max_length": lambda value: type(value) in (int, float) and value > 0,
    "model_input_names": lambda value: (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ),
}
TOKEN_KEYS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")  # of an added token
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
LINE = 1000  # longest line to train on, in characters. sentencepiece leaves out lines above 4,192 bytes
PROBES = [  # a converted tokenizer must have the ids of the original for these texts
    *("", " ", "   ", "\n", " \n\n x", "Hello world", " two  spaces ", "tab\tand\r\nlines\n"),
    *("1,234.5", "don't", "</s> <unk> <0x0A>", "\u2581\u2581a \u2581", "na\u00efve caf\u00e9", "e\u0301"),
    *("\u65e5\u672c\u8a9e \u65e5\u672c", "\U0001f642\n\U0001f642", "\x00\x7f"),
]
_FACTS: dict[str, TokenizerFacts] = {}  # by the content of the files, since computing them is slow


class TokenizerFacts(NamedTuple):
    """The facts of a saved tokenizer that data preparation depends on."""

    vocab_size: int
    bos_id: int | None  # the first token of every text, if the tokenizer adds one
    eos_id: int | None
    fingerprint: str
    after_bos: list[int] = []  # tokens that it adds after BOS, such as GLM's

    @property
    def start(self) -> list[int]:
        """Return the tokens before every text."""
        return [] if self.bos_id is None else [self.bos_id, *self.after_bos]


def load_tokenizer(path: str | Path, revision: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a directory, a sentencepiece .model file, or a hub id. Raises UserError.

    A directory has tokenizer.json, tokenizer.model, or vocab.json and merges.txt. The first of these is used.
    """
    from transformers import PreTrainedTokenizerFast

    local = _local(path, revision)
    backend, names = _read(local)
    template = chat_template(local)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, chat_template=template, **names
    )


def save_tokenizer(path: str | Path, revision: str | None, directory: Path) -> TokenizerFacts:
    """Save a tokenizer with its vocabulary files, settings and chat template. Return its facts.

    Does not import transformers, which takes seconds.
    """
    local = _local(path, revision)
    original = _content(local)
    backend, names = _read(local)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    sources = {name: local / name for name in VOCABULARIES} if local.is_dir() else {VOCABULARIES[0]: local}
    copied = {name: file for name, file in sources.items() if file.is_file()}
    for name, file in copied.items():
        if not (directory / name).exists() or not file.samefile(directory / name):
            shutil.copyfile(file, directory / name)
    base = backend.get_vocab(with_added_tokens=False)
    tokens = backend.get_added_tokens_decoder()
    added = {token.content: number for number, token in tokens.items() if token.content not in base}
    if copied and added:  # for llama.cpp
        (directory / ADDED).write_text(json.dumps(added, indent=1) + "\n", encoding="utf-8")
    config = _neutral_settings(local, {token.content for token in tokens.values()}) | {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(number): {key: getattr(token, key) for key in TOKEN_KEYS} for number, token in tokens.items()
        },
    }
    if (template := chat_template(local)) is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    facts = _facts(backend, names)
    _FACTS.update({original: facts, _content(directory): facts})
    return facts


def _neutral_settings(local: Path, added: set[str]) -> dict[str, object]:
    """Return the settings that do not change the ids of a text, and the special tokens without a role.

    Model inputs are token ids and mask unless the tokenizer names others: causal models take no token types.
    """
    settings: dict[str, object] = {"model_input_names": ["input_ids", "attention_mask"]}
    extra: list[str] = []
    roles: dict[str, object] = {}
    for file in (local / "special_tokens_map.json", local / "tokenizer_config.json"):
        tree = _read_if_present(file)
        settings |= {key: tree[key] for key, valid in NEUTRAL_SETTINGS.items() if valid(tree.get(key))}
        # Processors of images read these tokens by role. Version 5 of transformers writes them under a key of
        # their own, and both versions read the dictionary.
        named = tree.get("model_specific_special_tokens")
        roles |= named if isinstance(named, dict) else {}
        roles |= {key: tree[key] for key in tree if key.endswith("_token") and key not in ROLES}
        for key in ("additional_special_tokens", "extra_special_tokens"):
            named = tree.get(key)
            if isinstance(named, dict):
                roles |= named
            elif isinstance(named, list):
                contents = (token.get("content") if isinstance(token, dict) else token for token in named)
                extra += [token for token in contents if isinstance(token, str) and token in added]
    texts = {
        role: token.get("content") if isinstance(token, dict) else token for role, token in roles.items()
    }
    known = {role: text for role, text in texts.items() if isinstance(text, str) and text in added}
    settings |= {"extra_special_tokens": known} if known else {}
    return settings | ({"additional_special_tokens": list(dict.fromkeys(extra))} if extra else {})


def added_ids(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before and after every text."""
    encoded = backend.encode("a")
    columns = zip(encoded.ids, encoded.special_tokens_mask, encoded.attention_mask, strict=True)
    marked = [(number, bool(special)) for number, special, real in columns if real]  # without padding
    start = [number for number, _ in takewhile(itemgetter(1), marked)]
    end = [number for number, _ in takewhile(itemgetter(1), reversed(marked[len(start) :]))]
    return start, end[::-1]


# Options of a tokenizer's call: nothing is added to the text, and special tokens in it are plain text.
PLAIN = {"add_special_tokens": False, "split_special_tokens": True}


def text_ids(tokenizer: PreTrainedTokenizerFast, text: str, **options: bool) -> list[int]:
    """Return the ids of a text as in training rows: BOS if the tokenizer adds one, then its tokens.

    All prompts of models use this function, or the tokenizer of `load_tokenizer`, which adds the same tokens.
    Special tokens such as <unk> in the text are plain text. options: for the call of the tokenizer.
    """
    start, _ = added_ids(tokenizer.backend_tokenizer)
    return [*start, *tokenizer(text, **PLAIN, **options).input_ids]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast, eos_id: int | None = -1) -> str:
    """Return a hash of vocabulary, merges, text rules, special tokens and start tokens, 64 hex digits.

    Decoding, tokens after a text, and the form of unset values in files are not part of it.

    eos_id: replaces the end-of-sequence token. An export of a chat model has the end of a turn there, and
    still encodes texts like its training data.
    """
    backend = tokenizer.backend_tokenizer
    eos = tokenizer.eos_token_id if eos_id == -1 else eos_id
    return _fingerprint(backend, added_ids(backend)[0], eos)


def tokenizer_facts(directory: Path) -> TokenizerFacts:
    """Return the facts of a saved tokenizer. Does not import transformers."""
    return _FACTS.get(_content(directory)) or read_tokenizer(directory)[1]


def read_tokenizer(directory: Path) -> tuple[Tokenizer, TokenizerFacts]:
    """Return a saved tokenizer as the tokenizers library loads it, and its facts. Raises UserError."""
    content = _content(directory)
    backend, names = _read(directory, checked=content in _FACTS)
    if content not in _FACTS:
        _FACTS[content] = _facts(backend, names)
    return backend, _FACTS[content]


def _content(directory: Path) -> str:
    """Return the names and hashes of a tokenizer's files, as the key of its facts."""
    files = [directory] if directory.is_file() else [directory / name for name in FILES]
    return json.dumps([(file.name, sha256(file)) for file in files if file.is_file()])


def _facts(backend: Tokenizer, names: dict[str, str]) -> TokenizerFacts:
    """Return the facts of a tokenizer with these special tokens."""
    eos = backend.token_to_id(names.get("eos_token", ""))
    start, _ = added_ids(backend)
    size = 1 + max(backend.get_vocab().values(), default=-1)  # ids may have gaps
    bos = start[0] if start else None
    return TokenizerFacts(size, bos, eos, _fingerprint(backend, start, eos), start[1:])


def require_end(facts: TokenizerFacts, name: str, kind: str) -> str | None:
    """Return a note for the user if a tokenizer has no end-of-sequence token, or None.

    Raises UserError for instructions, which need the token.
    """
    if facts.eos_id is not None:
        return None
    lacks = f"tokenizer {name} has no end-of-sequence token"
    if kind == "instruct":
        raise UserError(
            f"{lacks}, which responses need. Set eos_token in its tokenizer_config.json to a token of its "
            "vocabulary",
            code="no-eos",
        )
    return f"note: {lacks}, so the ends of documents are not marked"


def _fingerprint(backend: Tokenizer, start: list[int], eos: int | None) -> str:
    """See `tokenizer_fingerprint`."""
    bos = start if len(start) > 1 else start[0] if start else None
    tree = json.loads(backend.to_str())
    added = [
        {"content": token["content"], "id": token["id"]} if token["special"] else token
        for token in tree["added_tokens"]
    ]
    tree["model"] = {key: value for key, value in tree["model"].items() if value not in (None, "")}
    rules = [tree[part] for part in ("model", "normalizer", "pre_tokenizer")]
    text = json.dumps([rules, added, bos, eos], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a sentencepiece BPE model like LLaMA's, with byte fallback and split digits, into `path`.

    Deterministic: one thread, no sampling. Raises UserError if the vocabulary is too large for the text, or
    too small for its characters.
    """
    import sentencepiece

    def sentences() -> Iterator[str]:
        """Yield lines in pieces of at most LINE characters, cut at spaces if possible."""
        for line in (line for text in texts for line in text.splitlines() if line.strip()):
            while len(line) > LINE:
                end = line.rfind(" ", 1, LINE)
                yield line[: end if end > 0 else LINE]
                line = line[end + 1 if end > 0 else LINE :]
            yield line

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as sink:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=sentences(),
                model_writer=sink,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                split_digits=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                character_coverage=0.9999,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            path.unlink(missing_ok=True)
            few = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
            reason = "its characters alone need more" if few else one_line(error)
            advice = f"data.train_tokenizer={few[1]} or more" if few else "a smaller data.train_tokenizer"
            raise UserError(
                f"no tokenizer of {vocab_size} pieces can be trained on this text: {reason}. Set {advice}",
                code="vocabulary-too-small" if few else "vocabulary-too-large",
            ) from None


def chat_template(directory: Path) -> str | None:
    """Return the (default) chat template of the tokenizer in a directory. Raises UserError."""
    file = directory / CHAT_TEMPLATE
    config = directory / "tokenizer_config.json"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = read_json(config, FILE_BYTES).get("chat_template") if config.is_file() else None
        if isinstance(template, list):  # several: {name: ..., template: ...}
            template = {choice["name"]: choice["template"] for choice in template}.get("default")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the chat_template of {directory} cannot be read ({one_line(error)})", code="chat-template"
        ) from None
    return template if isinstance(template, str) else None


def set_chat_template(directory: Path, template: str | None) -> None:
    """Give a saved tokenizer a chat template, or remove its template."""
    file = directory / "tokenizer_config.json"
    tree = read_json(file, FILE_BYTES) | {"chat_template": template}
    if template is None:
        del tree["chat_template"]
    file.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _local(path: str | Path, revision: str | None) -> Path:
    """Return the path of a local tokenizer, or of the files of a hub model from the cache or the network."""
    if Path(path).exists():
        return Path(path)
    files = [*FILES, CHAT_TEMPLATE]
    return hub_directory(str(path), revision, "tokenizer ", code="tokenizer", allow_patterns=files)


def _read(path: Path, checked: bool = False) -> tuple[Tokenizer, dict[str, str]]:
    """Return a tokenizer and its special tokens. Raises UserError.

    checked: the ids in these files were checked before. The check takes as long as reading them.
    """
    names: dict[str, str] = {}
    try:
        if path.is_file():
            backend, names = _from_sentencepiece(path)
        elif (path / "tokenizer.json").is_file():
            content = (path / "tokenizer.json").read_text(encoding="utf-8")
            if not checked:
                tree = parse_json(content)
                _check_ids(tree["model"]["vocab"], tree.get("added_tokens") or ())
            backend = Tokenizer.from_str(content)
            if "eos_token" not in special_names(path) and backend.token_to_id("<|endoftext|>") is not None:
                names = _byte_bpe_names(backend, path)  # GPT-2's directory does not name them
        elif (path / "tokenizer.model").is_file():
            backend, names = _from_sentencepiece(path / "tokenizer.model")
        elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            backend, names = _from_byte_bpe(path)
        else:
            raise UserError(
                f"tokenizer {path} needs tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
                code="tokenizer",
            )
        names |= special_names(path)
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # it makes the ids random
        _apply_flags(backend, names, path)
        return backend, names
    except UserError:
        raise
    except Exception as error:  # a broken file; `tokenizers` raises plain Exception
        raise UserError(f"tokenizer {path} cannot be read: {one_line(error)}", code="tokenizer") from None


def special_names(directory: Path) -> dict[str, str]:
    """Return the special tokens in the configuration files of a directory."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        tree = _read_if_present(directory / file)
        for name in SPECIALS:
            value = tree.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if value:
                if not isinstance(value, str):
                    raise ValueError(f"{file}: {name} must be text, not {type(value).__name__}")
                value.encode()  # raises for half a surrogate pair
                names[name] = value
    return names


def _read_if_present(file: Path) -> Any:
    """Return the content of a JSON file, or an empty object if there is no such file."""
    return read_json(file) if file.is_file() else {}


def _apply_flags(backend: Tokenizer, names: dict[str, str], directory: Path) -> None:
    """Make a tokenizer add BOS and EOS according to add_bos_token and add_eos_token of its configuration.

    Without a flag the post-processor in tokenizer.json decides, as in `AutoTokenizer`. The flags become part
    of the post-processor, so that all users of the saved tokenizer get the same ids.
    """
    file = directory / "tokenizer_config.json"
    settings = _read_if_present(file)
    current = [[str(backend.id_to_token(number)) for number in ids] for ids in added_ids(backend)]
    wanted = []
    for kind, added in zip(("bos", "eos"), current, strict=True):
        flag = settings.get(f"add_{kind}_token")
        token = names.get(f"{kind}_token", "")
        if flag is True and not added and backend.token_to_id(token) is not None:
            added = [token]
        if flag not in (None, False) and not (flag is True and added):
            reason = "there is no such token" if flag is True else "it must be true or false"
            raise UserError(f"{file}: add_{kind}_token is {flag!r}, but {reason}", code="tokenizer")
        wanted.append([] if flag is False else added)
    if wanted != current:
        _set_added(backend, *wanted)


def _set_added(backend: Tokenizer, start: list[str], end: list[str]) -> None:
    """Make a tokenizer add these tokens before and after every text."""
    special: Any = [(token, backend.token_to_id(token)) for token in dict.fromkeys((*start, *end))]
    single = [*start, "$A", *end]
    pair = [*start, "$A", "$B", *end]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _from_sentencepiece(file: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return a BPE sentencepiece model as a fast tokenizer with the same ids for every text."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    content = file.read_bytes()
    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(content)
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    odd = {p.type for p in model.pieces} - {NORMAL, UNKNOWN, CONTROL, BYTE}
    rewrites = normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces
    if trainer.model_type != trainer.BPE or rewrites or odd or trainer.treat_whitespace_as_suffix:
        raise UserError(
            f"tokenizer {file} is not a plain BPE sentencepiece model like LLaMA's. "
            "Use a directory with its tokenizer.json",
            code="tokenizer",
        )
    vocab = {piece.piece: i for i, piece in enumerate(model.pieces)}
    unknown = next(p.piece for p in model.pieces if p.type == UNKNOWN)
    ranked = []  # all ways to merge two pieces into a third. sentencepiece uses the best score first
    for i, piece in enumerate(model.pieces):
        text = piece.piece if piece.type == NORMAL else ""
        for cut in range(1, len(text)):
            left = text[:cut]
            right = text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-piece.score, i, vocab[left], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": bool(trainer.byte_fallback)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    prefix = [normalizers.Prepend(SPACE)] if normalizer.add_dummy_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    controls = [p.piece for p in model.pieces if p.type in (UNKNOWN, CONTROL)]
    backend.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in controls])
    roles = {"unk_token": unknown, "bos_token": trainer.bos_piece, "eos_token": trainer.eos_piece}
    names = {name: piece for name, piece in roles.items() if piece in vocab}
    original = SentencePieceProcessor(model_proto=content)
    backend.encode_special_tokens = True
    for text in PROBES:
        if backend.encode(text, add_special_tokens=False).ids != original.encode(text):
            raise UserError(
                f"tokenizer {file} cannot be converted: {text!r} would have other ids than in "
                "sentencepiece. Use a directory with its tokenizer.json",
                code="tokenizer",
            )
    backend.encode_special_tokens = False
    if "bos_token" in names:  # as the models of this kind were trained
        _set_added(backend, [names["bos_token"]], [])
    return backend, names


def _check_ids(vocab: Any, added: Iterable[Any] = ()) -> None:
    """Raise ValueError for implausible ids: the library allocates memory for all ids below the largest.

    vocab: ids by piece, or a list of pieces, which has no ids.
    """
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token["id"] for token in added)]
    if not all(type(number) is int and 0 <= number < MAX_IDS for number in ids):
        raise ValueError(f"a token id is not a number below {MAX_IDS:,}")


def _from_byte_bpe(directory: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return a byte-level BPE tokenizer like GPT-2's from its vocabulary, and its special tokens."""
    _check_ids(read_json(directory / "vocab.json", FILE_BYTES))
    backend = Tokenizer(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    names = _byte_bpe_names(backend, directory)
    specials = [AddedToken(n, special=True, normalized=False) for n in sorted(set(names.values()))]
    backend.add_special_tokens(specials)
    if names["bos_token"] == "</s>":
        _set_added(backend, ["</s>"], [])
    return backend, names


def _byte_bpe_names(backend: Tokenizer, directory: Path) -> dict[str, str]:
    """Return the special tokens of GPT-2 and OPT, which use one token for all roles."""
    for end, others in (("</s>", {"pad_token": "<pad>"}), ("<|endoftext|>", {})):  # OPT also has the second
        if backend.token_to_id(end) is not None:
            return dict.fromkeys(SPECIALS[:3], end) | others
    raise UserError(
        f"tokenizer {directory} has no end-of-text token (looked for <|endoftext|> and </s>). Set eos_token "
        "in its tokenizer_config.json",
        code="no-eos",
    )
