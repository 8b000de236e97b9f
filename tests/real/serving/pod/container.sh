# Runs a command like a container of the "restricted" Pod Security Standard, with namespaces only:
#   unshare ... sh container.sh WORKDIR SECRET TMP COMMAND...
# WORKDIR becomes /srv, SECRET /mnt (read-only), TMP /tmp; all else is read-only; all capabilities are dropped.
set -e
mount --bind "$1" /srv
mount --bind -o ro "$2" /mnt
mount --bind "$3" /tmp
mount -t proc proc /proc
mount -o remount,bind,ro /
shift 3
cd /
exec setpriv --ambient-caps=-all --inh-caps=-all --bounding-set=-all --no-new-privs "$@"
