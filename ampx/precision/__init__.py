"""Which numbers are in which dtype: policies, opt levels, and schedules of both."""
