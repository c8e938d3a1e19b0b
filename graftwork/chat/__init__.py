"""Conversations as prompts: chat templates, where a model's files hold them, and `Model.chat`."""
