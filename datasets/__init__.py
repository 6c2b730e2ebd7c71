"""Stallscope: datasets (see docs/design.md)."""
