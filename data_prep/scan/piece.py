"""What a worker finds in a piece of an input: of each row its hash, its length, and why it cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from data_prep.inputs import Piece, Place
from data_prep.rows import (
    CODE,
    STRUCTURE,
    Rejected,
    Row,
    RowSpec,
    checksum,
    columns,
    content_hash,
    parse,
    plain_text,
)
from data_prep.scan.near import signatures
from data_prep.templates import Chat, Conversation
from data_prep.templates.chat import ChatTemplate, RefusedError, render


class ScannedPiece(NamedTuple):
    """What is known of the rows of a piece."""

    place: Place
    hashes: np.ndarray  # uint64 [rows]
    chars: np.ndarray  # uint32 [rows]
    reasons: np.ndarray  # uint8 [rows], index into REASONS; 0: usable
    signatures: np.ndarray | None  # uint32 [rows, 1 or 2, PERMUTATIONS]; zeros of those that are not usable
    check: int  # checksum of the piece
    fault: tuple[int, str] | None  # the first row that breaks the structure, and how
    columns: tuple[set[str], set[str]]  # read and not read; of an input's first piece
    messages: int  # of conversations, that were left out

    def first(self, limit: int) -> ScannedPiece:
        """The same piece with all rows after the first `limit` marked as beyond the source's limit."""
        self.reasons[limit:] = CODE["limit"]
        return self


def scanner(near: bool, chat: ChatTemplate | None) -> Callable[[tuple[Piece, RowSpec]], ScannedPiece]:
    """A function that parses and checks the rows of a piece, for a worker.

    near: with signatures; chat: the template that must be able to write them.
    """

    def scan_piece(item: tuple[Piece, RowSpec]) -> ScannedPiece:
        (place, payload), spec = item
        parsed = [Rejected("too_long")] if payload is None else parse(payload, spec)
        rows: list[Row] = []  # that are usable
        hashes, chars, reasons, fault, messages = [], [], [], None, 0
        for number, row in enumerate(_written(row, chat) for row in parsed):
            if isinstance(row, Rejected):
                if fault is None and row.reason in STRUCTURE:
                    fault = number, row.detail
                hashes.append(0)
                chars.append(0)
                reasons.append(CODE[row.reason])
                continue
            hashes.append(content_hash(row))
            chars.append(len(plain_text(row)))
            reasons.append(0)
            messages += row.unused if isinstance(row, Conversation | Chat) else 0
            if near:
                rows.append(row)
        codes, signed = np.array(reasons, np.uint8), None
        if near:
            found = signatures(rows, spec.kind)
            signed = np.zeros((len(codes), *found.shape[1:]), np.uint32)
            signed[codes == 0] = found
        return ScannedPiece(
            place,
            np.array(hashes, np.uint64),
            np.array(chars, np.uint32),
            codes,
            signed,
            0 if payload is None else checksum(payload),
            fault,
            (set(), set()) if payload is None or place.start else columns(payload, spec),
            messages,
        )

    return scan_piece


def _written(row: Row | Rejected, chat: ChatTemplate | None) -> Row | Rejected:
    """The row, unless it is a chat that the template does not write."""
    if chat is not None and isinstance(row, Chat):
        try:
            render(row, chat)
        except RefusedError as error:
            return Rejected(error.reason, error.detail)
    return row
