"""Settings of the whole suite."""

import os

from hypothesis import settings

# No deadline: machines are shared, and a slow example is no failure. In CI the same examples each time.
settings.register_profile("stallscope", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("stallscope")
