"""Plugs raytorchrpc into packages of others. Each integration imports its package; nothing else here imports them."""
