"""Answers of the commands of `dpsgd`, imported when called: functions of their questions."""
