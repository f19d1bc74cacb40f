"""Runs that measure: arms (processes that each train once and write what happened), their runner, their comparison."""
