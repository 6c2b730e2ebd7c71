"""Stallscope: gpu (see docs/design.md)."""
