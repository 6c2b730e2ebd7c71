"""Stallscope: profiler (see docs/design.md)."""
