package evernear;

import io.grpc.InternalGlobalInterceptors;
import io.grpc.Server;
import io.netty.bootstrap.ServerBootstrap;
import io.netty.channel.Channel;
import io.netty.channel.ChannelFuture;
import io.netty.channel.ChannelOption;
import io.netty.channel.EventLoopGroup;
import io.netty.util.internal.logging.InternalLoggerFactory;
import io.netty.util.internal.logging.Slf4JLoggerFactory;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.commons.cli.DefaultParser;
import org.apache.logging.log4j.LogManager;
import org.pytorch.serve.ModelServer;
import org.pytorch.serve.metrics.MetricCache;
import org.pytorch.serve.servingsdk.impl.PluginsManager;
import org.pytorch.serve.util.ConfigManager;
import org.pytorch.serve.util.Connector;
import org.pytorch.serve.util.ConnectorType;
import org.pytorch.serve.util.TokenAuthorization;
import org.pytorch.serve.wlm.ModelManager;
import org.pytorch.serve.wlm.WorkerThread;

/**
 * TorchServe's frontend, with behavior that cannot be configured in TorchServe 0.12.
 *
 * <ul>
 *   <li>On SIGTERM, it drains: it rejects new connections, responds to every in-flight request, and exits.
 *   <li>Requests of one connection are answered in order, one at a time.
 *   <li>The token is checked before a body is stored. In-flight bytes, connections and waits are limited.
 *   <li>A request waits only while all workers are busy, and passes through one thread.
 *   <li>Malformed requests get a 4xx status and a message, not a reset or a 500.
 *   <li>If a process owns the server (serve --foreground), the server ends with it, even if it is killed.
 *   <li>In a pod, inference requires the token that all replicas share, and GET /ready is a readiness probe.
 * </ul>
 */
public final class Frontend extends ModelServer {
    private static final Path OWNER_FILE = Path.of("owner.pid");
    private static final int OWNER_POLL_MS = 500;
    private static final int WORKER_EXIT_S = 4; // less than JAVA_EXIT_S in pod.py

    private final Traffic traffic = new Traffic();
    private final byte[] query;
    private Channel listener;

    private Frontend(ConfigManager config) throws IOException {
        super(config);
        Private.set(Private.get(this, "serverGroups"), "backendGroup", Batching.LOOP);
        String file = System.getProperty("evernear.query_file");
        query = file == null ? null : Files.readAllBytes(Path.of(file));
    }

    public static void main(String[] arguments) {
        Masking.install();
        try {
            ConfigManager.init(
                    new ConfigManager.Arguments(
                            new DefaultParser().parse(ConfigManager.Arguments.getOptions(), arguments, null, false)));
            TokenAuthorization.init();
            Token.share();
            PluginsManager.getInstance().initialize();
            MetricCache.init();
            InternalLoggerFactory.setDefaultFactory(Slf4JLoggerFactory.INSTANCE);
            Frontend frontend = new Frontend(ConfigManager.getInstance());
            Runtime.getRuntime().addShutdownHook(new Thread(frontend::drain, "drain"));
            InternalGlobalInterceptors.setInterceptorsTracers(
                    List.of(), List.of(new GrpcTraffic(frontend.traffic)), List.of());
            frontend.startRESTserver();
            frontend.startGRPCServers();
            System.out.println("Model server started.");
            endWithOwner();
        } catch (Throwable fault) {
            fault.printStackTrace();
            System.err.println(fault);
            Runtime.getRuntime().halt(1);
        }
    }

    /** Creates a listener like TorchServe's that also tracks and limits its connections, and resets none of them. */
    @Override
    public ChannelFuture initializeServer(
            Connector connector, EventLoopGroup acceptors, EventLoopGroup workers, ConnectorType type)
            throws InterruptedException {
        boolean isInference = type == ConnectorType.INFERENCE_CONNECTOR;
        if (isInference) {
            Batching.install();
        }
        Channel bound =
                new ServerBootstrap()
                        .group(acceptors, isInference ? Batching.LOOP : workers)
                        .channel(connector.getServerChannel())
                        .option(ChannelOption.SO_BACKLOG, 1024)
                        .handler(new ConnectionLimit(isInference ? Limits.CONNECTIONS : Limits.OTHER_CONNECTIONS))
                        .childOption(ChannelOption.SO_KEEPALIVE, true)
                        .childOption(ChannelOption.TCP_NODELAY, true)
                        .childOption(ChannelOption.ALLOW_HALF_CLOSURE, true)
                        .childHandler(new Pipeline(type, isInference ? traffic : new Traffic(), query))
                        .bind(address(connector, type))
                        .sync()
                        .channel();
        if (isInference) {
            listener = bound;
        }
        return bound.closeFuture();
    }

    /** The address to bind to. TorchServe's address pattern does not accept IPv6. */
    private static SocketAddress address(Connector connector, ConnectorType type) {
        String host = System.getProperty("evernear.host");
        SocketAddress configured = connector.getSocketAddress();
        return host == null || type == ConnectorType.MANAGEMENT_CONNECTOR
                ? configured
                : new InetSocketAddress(host, ((InetSocketAddress) configured).getPort());
    }

    /** The shutdown hook: rejects new connections, responds to in-flight requests, and exits within the timeout. */
    private void drain() {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.getLong("evernear.drain_timeout_s", 30));
        try {
            if (listener != null) {
                // This comes first, so that a closed connection cannot reconnect.
                listener.close().sync();
            }
            Server rpc = Private.get(this, "inferencegRPCServer");
            if (rpc != null) {
                rpc.shutdown();
            }
            traffic.drain(deadline);
            if (rpc != null) {
                rpc.awaitTermination(deadline - System.nanoTime(), TimeUnit.NANOSECONDS);
            }
            endWorkers();
            LogManager.shutdown();
        } catch (InterruptedException fault) {
            fault.printStackTrace();
        } finally {
            // TorchServe's stop method would take seconds.
            Runtime.getRuntime().halt(0);
        }
    }

    /**
     * Closes the workers' connections, and waits until the workers have written the query log and exited. In a pod, this
     * process has the ID 1, so its end would kill them.
     */
    private static void endWorkers() throws InterruptedException {
        List<CompletableFuture<Process>> exits = new ArrayList<>();
        for (WorkerThread worker : ModelManager.getInstance().getWorkers().values()) {
            List<Channel> connections = Private.get(worker, "backendChannel");
            Process process = worker.getLifeCycle().getProcess();
            if (process != null && !connections.isEmpty()) {
                // TorchServe interrupts this thread when the connection closes, and the thread kills the worker.
                Private.<AtomicReference<Thread>>get(worker, "currentThread").set(null);
                exits.add(process.onExit());
                List.copyOf(connections).forEach(Channel::close);
            }
        }
        try {
            CompletableFuture.allOf(exits.toArray(CompletableFuture[]::new)).get(WORKER_EXIT_S, TimeUnit.SECONDS);
        } catch (ExecutionException | TimeoutException fault) {
            System.err.println("Workers do not exit, and lose queries that are not logged yet: " + fault);
        }
    }

    private static void endWithOwner() throws InterruptedException, IOException {
        while (!Files.exists(OWNER_FILE)) {
            Thread.sleep(OWNER_POLL_MS);
        }
        long owner = Long.parseLong(Files.readString(OWNER_FILE).trim());
        ProcessHandle.of(owner).ifPresent(process -> process.onExit().join());
        System.exit(0);
    }
}

/** The inference token: TorchServe's token, or the token that the replicas of a Service share. */
final class Token {
    private Token() {}

    /** Reads the shared token from its file, if any, so that TorchServe checks it for REST and gRPC. */
    static void share() throws IOException {
        String file = System.getProperty("evernear.token_file");
        if (file != null) {
            Private.set(TokenAuthorization.class, "inferenceKey", Files.readString(Path.of(file)).trim());
        }
    }

    /** The token that requests must have, or null if tokens are disabled. */
    static String get() {
        return Private.get(TokenAuthorization.class, "inferenceKey");
    }
}

