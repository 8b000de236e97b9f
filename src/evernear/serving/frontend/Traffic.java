package evernear;

import io.netty.channel.Channel;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;

/** The connections of one listener, and whether predictions are answered. */
final class Traffic {
    private static final long FRESH_NS = TimeUnit.SECONDS.toNanos(2); // so old an answer proves that others come
    private static final int SETTLE_MS = 200; // by then, what was accepted last has become a connection
    private static final int QUIET_MS = 1000; // who sends nothing for so long is idle, and may be cut off
    private static final int POLL_MS = 10;

    private final Set<Connection> connections = ConcurrentHashMap.newKeySet();
    private volatile boolean draining;
    private volatile long answered = System.nanoTime() - FRESH_NS;

    /** A prediction was answered. */
    void answered() {
        answered = System.nanoTime();
    }

    /** Whether one was, a moment ago. */
    boolean isAnswered() {
        return System.nanoTime() - answered < FRESH_NS;
    }

    void add(Connection connection) {
        connections.add(connection);
    }

    void remove(Connection connection) {
        connections.remove(connection);
    }

    boolean isDraining() {
        return draining;
    }

    /** Let every connection end with its next answer, and wait until all have, but for idle ones. */
    void drain(long deadline) throws InterruptedException {
        draining = true;
        Thread.sleep(SETTLE_MS);
        long quiet = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(QUIET_MS);
        while (System.nanoTime() < deadline && isAwaited(System.nanoTime() < quiet)) {
            Thread.sleep(POLL_MS);
        }
    }

    private boolean isAwaited(boolean idleToo) {
        return connections.stream().anyMatch(connection -> idleToo || connection.isBusy());
    }
}

/** Accepts no connection beyond the limit until another ends; meanwhile they wait in the listener's backlog. */
final class ConnectionLimit extends ChannelInboundHandlerAdapter {
    private final int limit;
    private int open; // changed on the listener's own thread alone

    ConnectionLimit(int limit) {
        this.limit = limit;
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object connection) {
        Channel listener = context.channel();
        add(listener, 1);
        ((Channel) connection)
                .closeFuture()
                .addListener(closed -> listener.eventLoop().execute(() -> add(listener, -1)));
        context.fireChannelRead(connection);
    }

    private void add(Channel listener, int connections) {
        open += connections;
        listener.config().setAutoRead(open < limit);
    }
}
