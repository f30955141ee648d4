"""The user's own files: tables, images, texts, parties; reading, encoding, agreeing on columns."""
