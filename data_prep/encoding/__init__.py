"""From text and chats to token ids."""
