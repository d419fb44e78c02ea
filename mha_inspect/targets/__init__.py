"""Modules that a user brings along: how they are imported, built, and what goes into their forward."""
