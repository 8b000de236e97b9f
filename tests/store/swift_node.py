"""Run a minimal OpenStack Swift in one directory until standard input closes.

``python swift_node.py DIRECTORY PROXY_PORT ACCOUNT_PORT CONTAINER_PORT OBJECT_PORT``: one disk, one replica, the
S3 API in front, user ``test:tester`` with the secret ``testing``.
"""

import os
import signal
import sys
from pathlib import Path

from swift.common import utils
from swift.common.ring import RingBuilder
from swift.common.wsgi import run_wsgi

SWIFT = """
[swift-hash]
swift_hash_path_prefix = test
swift_hash_path_suffix = test
"""
DEFAULT = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
swift_dir = {directory}
devices = {directory}
mount_check = false
disable_fallocate = true
# A machine at its limits must not look like a broken disk.
conn_timeout = 30
node_timeout = 60
"""
STORAGE = """
[pipeline:main]
pipeline = {role}-server
[app:{role}-server]
use = egg:swift#{role}
"""
PROXY = """
[pipeline:main]
pipeline = catch_errors cache listing_formats s3api tempauth bulk slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
recoverable_node_timeout = 60
error_suppression_limit = 1000000
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
"""


def ring(directory: Path, role: str, port: int) -> None:
    builder = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
    builder.add_dev(
        {"id": 0, "region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "disk", "weight": 1}
        | {"meta": "", "replication_ip": "127.0.0.1", "replication_port": port}
    )
    builder.rebalance()
    builder.get_ring().save(str(directory / f"{role}.ring.gz"))


def main() -> None:
    directory = Path(sys.argv[1])
    ports = dict(zip(("proxy", "account", "container", "object"), map(int, sys.argv[2:]), strict=True))
    (directory / "disk").mkdir(parents=True)
    (directory / "swift.conf").write_text(SWIFT)
    utils.set_swift_dir(str(directory))
    for role, port in ports.items():
        rest = PROXY if role == "proxy" else STORAGE.format(role=role)
        (directory / f"{role}.conf").write_text(DEFAULT.format(port=port, directory=directory) + rest)
        if role != "proxy":
            ring(directory, role, port)
    children = []
    for role in ports:
        child = os.fork()
        if child == 0:
            sys.exit(run_wsgi(str(directory / f"{role}.conf"), f"{role}-server"))
        children.append(child)
    sys.stdin.read()
    for child in children:
        os.kill(child, signal.SIGTERM)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
