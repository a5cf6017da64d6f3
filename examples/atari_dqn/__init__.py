"""Trains DQN on Atari games: collectors play, and one learner trains. See README.md."""
