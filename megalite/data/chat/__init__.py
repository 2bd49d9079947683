"""Conversations and preferences: rows, chat templates, and which tokens are trained."""
