package evernear;

import io.netty.channel.Channel;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.prometheus.client.Histogram;
import java.util.Arrays;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;

/** The connections of one listener, the time of the latest successful prediction, and how long clients wait. */
final class Traffic {
    private static final Histogram WAITS =
            Histogram.build("evernear_request_seconds", "Time from the end of a request until its prediction.")
                    .buckets(
                            Arrays.stream(System.getProperty("evernear.seconds_bounds").split(","))
                                    .mapToDouble(Double::parseDouble)
                                    .toArray())
                    .register();
    private static final long FRESH_NS = TimeUnit.SECONDS.toNanos(2); // predictions up to this age prove readiness
    private static final int SETTLE_MS = 200; // time for the last accepted sockets to become connections
    private static final int QUIET_MS = 1000; // clients that send nothing for this time are idle, and may be closed
    private static final int POLL_MS = 10;

    private final Set<Connection> connections = ConcurrentHashMap.newKeySet();
    private volatile boolean draining;
    private volatile long latestPrediction = System.nanoTime() - FRESH_NS;

    /** Records a successful prediction. */
    void predictionSucceeded() {
        latestPrediction = System.nanoTime();
    }

    /** Records a successful prediction for a client whose request was complete at {@code received}. */
    void predictionSucceeded(long received) {
        predictionSucceeded();
        WAITS.observe((System.nanoTime() - received) / 1e9);
    }

    /** Whether a prediction succeeded a moment ago. */
    boolean hasRecentPrediction() {
        return System.nanoTime() - latestPrediction < FRESH_NS;
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

    /** Closes every connection after its next response, and waits for all connections that are not idle. */
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

/** Stops accepting at the limit until a connection closes. New connections wait in the listener's backlog. */
final class ConnectionLimit extends ChannelInboundHandlerAdapter {
    private final int limit;
    private int open; // changed only on the listener's thread

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
