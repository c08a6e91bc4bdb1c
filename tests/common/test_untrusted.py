"""Files of others: read within bounds, and nowhere but where they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.lease import Lease
from common.untrusted import arrays, check_unpacked, is_plain_name, links_outside, read_bytes, read_json
from common.weights import check_directory, load_causal_lm, load_config


def test_reading_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, message in (
        ("[" * 100_000, "nested too deeply"),
        ('"' + "x" * 2000 + '"', "more than 1 KiB"),
        ("9" * 5000, "more than 1 KiB"),
        ("{", "Expecting"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_json(path, 1 << 20 if content.startswith("[") else 1024)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="not a file"):
            read_bytes(tmp_path / name, 10)


@pytest.mark.parametrize(
    ("found", "there"),
    [(b"'<f4'", b"'<f4("), (b"'descr'", b"'d\\x'cr"), (b"NUMPY", b"NUMBY"), (b"(9,)", b"(8,,")],
)
def test_damaged_arrays_are_value_errors(found: bytes, there: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(9, np.float32))
    sound = path.read_bytes()
    assert found in sound
    path.write_bytes(sound.replace(found, there))
    with pytest.raises(ValueError, match=r"."), arrays():
        np.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"."), arrays():
        np.load(path)


def test_plain_names() -> None:
    assert all(map(is_plain_name, ("a", "a.b", "..a", " ")))
    assert not any(map(is_plain_name, ("", ".", "..", "a/b", "/a", "a\\b", "a\0", "a" * 300, 3, None)))


def test_links_out_of_a_directory_are_found(tmp_path: Path) -> None:
    place = tmp_path / "model"
    (place / "part").mkdir(parents=True)
    (place / "a").write_text("a")
    (place / "b").symlink_to("a")
    assert not list(links_outside(place))
    (place / "part/c").symlink_to("../../outside")
    (place / "d").symlink_to("/etc")
    assert sorted(p.name for p in links_outside(place)) == ["c", "d"]


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/123"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    (blobs / "x").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/x")
    assert not list(links_outside(snapshot))
    (snapshot / "other.json").symlink_to("../../../secret")
    assert [p.name for p in links_outside(snapshot)] == ["other.json"]


def test_a_packed_npz_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 20))
    with pytest.raises(ValueError, match="packed"):
        check_unpacked(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros(9))
    check_unpacked(tmp_path / "b.npz")


@pytest.mark.parametrize(
    "content", [b"[1]", b"\xff\xfe", b"[" * 3000, b'{"machine": "x", "pid": {}}', b"null"]
)
def test_a_lease_of_nonsense_ends(tmp_path: Path, content: bytes) -> None:
    """It keeps others out for no longer than one that holds nothing."""
    path = tmp_path / "a.000001"
    path.write_bytes(content)
    os.utime(path, (1, 1))
    lease = Lease(tmp_path, "a", 60.0)
    assert lease.holder() is None
    assert lease.acquire()
    lease.release()


def test_a_lease_that_names_a_process_wrongly_is_nobodys(tmp_path: Path) -> None:
    holder = Lease(tmp_path, "a", 60.0)
    assert holder.acquire() and holder.path is not None
    owner = json.loads(holder.path.read_text())
    for pid in ("../../../etc", None, True):
        holder.path.write_text(json.dumps(owner | {"pid": pid, "started": None}))
        other = Lease(tmp_path, "a", 60.0)
        if pid is not True:
            assert other.acquire()
            other.release()
        holder.path.touch()


def test_lease_names_are_no_patterns(tmp_path: Path) -> None:
    first, second = Lease(tmp_path, "a[1]*", 60.0), Lease(tmp_path, "a[1]*", 60.0)
    assert first.acquire()
    assert not second.acquire()
    (tmp_path / "a[1]*.9x").touch()
    assert not second.acquire()
    first.release()


# --- models -----------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}


def model(place: Path, **config: object) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(LLAMA | config))
    return place


def test_an_index_names_files_beside_it(tmp_path: Path) -> None:
    place = model(tmp_path / "m")
    index = place / "model.safetensors.index.json"
    for name in ("../other/model.safetensors", "/etc/hostname", "..", 3):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(UserError, match="the name of a file beside it"):
            check_directory(place)
        with pytest.raises(UserError, match="the name of a file beside it"):
            load_causal_lm(place)


def test_links_in_a_model_lead_nowhere_else(tmp_path: Path) -> None:
    place = model(tmp_path / "m")
    (tmp_path / "secret.json").write_text("{}")
    (place / "tokenizer.json").symlink_to("../secret.json")
    with pytest.raises(UserError, match=r"tokenizer.json is a link to .*secret.json, outside"):
        load_config(place)


def test_settings_of_a_model_are_bounded(tmp_path: Path) -> None:
    place = model(tmp_path / "m")
    for content, message in (("[" * 100_000, "nested too deeply"), ("[]", "must hold a JSON object")):
        (place / "config.json").write_text(content)
        with pytest.raises(UserError, match=message):
            load_config(place)


def test_a_configuration_that_cannot_be_is_told(tmp_path: Path) -> None:
    made: list[dict[str, object]] = [{"vocab_size": [[]]}, {"dtype": "os"}, {"num_hidden_layers": 10**12}]
    for number, config in enumerate(made):
        with pytest.raises(ValueError, match=r"config.json: |vocab_size|dtype"):
            load_config(model(tmp_path / str(number), **config))


def test_code_in_a_model_is_not_run(tmp_path: Path) -> None:
    place = model(tmp_path / "m", model_type="own", auto_map={"AutoConfig": "own.Config"})
    (place / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(UserError, match="needs Python code of its own"):
        load_config(place)
    with pytest.raises(UserError, match="needs Python code of its own"):
        load_causal_lm(place)
    assert not (tmp_path / "ran").exists()


class Harmful:
    """What a pickle can be."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def test_pickled_weights_are_tensors_or_nothing(tmp_path: Path) -> None:
    """`.bin` is read with weights_only: sound ones load, harmful ones do no harm."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    place = model(tmp_path / "m", num_attention_heads=2, num_hidden_layers=1)
    weights = LlamaForCausalLM(LlamaConfig.from_pretrained(place)).state_dict()
    torch.save(weights, place / "pytorch_model.bin")
    assert not load_causal_lm(place).missing
    torch.save(weights | {"x": Harmful(tmp_path / "ran")}, place / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"a pickle that is more than tensors \(posix.system\)"):
        load_causal_lm(place)
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(place)
