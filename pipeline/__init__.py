"""Stallscope: pipeline (see docs/design.md)."""
