"""Encoding of texts and chats as token ids."""
