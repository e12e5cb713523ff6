"""The users of a load test: who sends when, what is asked, how answers are checked, what is told of it."""
