"""Declarations that the native modules share."""
