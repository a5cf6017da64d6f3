"""DQN on Atari games: collectors play, one learner trains; see README.md."""
